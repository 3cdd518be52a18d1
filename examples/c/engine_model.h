/* What stands for the rest of a model around the layer of engine.c: weights, tokens and what the projections before
 * the layer make of them; and the layer itself, token by token in double, to check the engine by. */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The layer. Hopper has chunked kernels of its own for K = V = 128. */
enum { HK = 2, HV = 4, K = 128, V = 128, W = 4, D = 2 * HK * K + HV * V, VOCAB = 32 };

/* Of each token: the convolution's input, the norm's gate, and what decay and beta are made of. */
static float x_of[VOCAB][D], z_of[VOCAB][HV * V], a_of[VOCAB][HV], b_of[VOCAB][HV];
static float conv_weight_of[D][W], A_log_of[HV], dt_bias_of[HV], norm_weight_of[V];

/* To nearest, ties to even. */
static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float from_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

static uint64_t random_state = 1;
/* About normal: a sum of uniform numbers. Of numbers that bf16 can hold, so that both types compute with the same. */
static void fill(float* to, int count, float mean, float scale) {
  int i, j;
  for (i = 0; i < count; ++i) {
    float sum = -6;
    for (j = 0; j < 12; ++j) {
      random_state = random_state * 6364136223846793005u + 1442695040888963407u;
      sum += (float)(random_state >> 40) / 16777216.0f;
    }
    to[i] = from_bf16(to_bf16(mean + scale * sum));
  }
}
static void make_model(void) {
  fill(&x_of[0][0], VOCAB * D, 0, 1), fill(&z_of[0][0], VOCAB * HV * V, 0, 1);
  fill(&a_of[0][0], VOCAB * HV, -2, 1), fill(&b_of[0][0], VOCAB * HV, 0, 1);
  fill(&conv_weight_of[0][0], D * W, 0, 0.5f), fill(norm_weight_of, V, 1, 0.1f);
  fill(A_log_of, HV, 0, 0.5f), fill(dt_bias_of, HV, 0, 0.5f);
}

/* Stands for logits and sampling: the token at a position of a request, of its prompt or chosen by the model. */
static int true_token(int request, int position) {
  const uint32_t hash = (uint32_t)request * 2654435761u ^ (uint32_t)position * 40503u;
  return (int)(((hash ^ hash >> 13) * 2246822519u >> 8) % VOCAB);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double dot(const double* a, const double* b, int count) {
  double sum = 0;
  int i;
  for (i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}
/* The relative error of a request's outputs y [length][HV * V], in the L2 norm. */
static double error_of(int request, int length, const float* y) {
  static double S[HV][V][K], c[D];
  double wrong = 0, size = 0;
  int t, h, i, j;
  memset(S, 0, sizeof S);
  for (t = 0; t < length; ++t) {
    const int token = true_token(request, t);
    for (i = 0; i < D; ++i) {
      for (c[i] = 0, j = 0; j < W; ++j)
        if (t - W + 1 + j >= 0) c[i] += (double)conv_weight_of[i][j] * x_of[true_token(request, t - W + 1 + j)][i];
      c[i] *= sigmoid(c[i]);
    }
    for (h = 0; h < HV; ++h) {
      const double *q = c + h / (HV / HK) * K, *k = q + HK * K, *v = c + 2 * HK * K + h * V;
      const double q_scale = 1 / sqrt((dot(q, q, K) + 1e-6) * K), k_scale = 1 / sqrt(dot(k, k, K) + 1e-6);
      const double alpha = exp(-exp(A_log_of[h]) * log1p(exp(a_of[token][h] + dt_bias_of[h])));
      double out[V], mean;
      for (i = 0; i < V; ++i) {
        double* const s = S[h][i];
        const double e = sigmoid(b_of[token][h]) * (v[i] - alpha * k_scale * dot(s, k, K)) * k_scale;
        for (j = 0; j < K; ++j) s[j] = alpha * s[j] + e * k[j];
        out[i] = q_scale * dot(s, q, K);
      }
      mean = sqrt(dot(out, out, V) / V + 1e-6);
      for (i = 0; i < V; ++i) {
        const double z = z_of[token][h * V + i], expected = norm_weight_of[i] * out[i] / mean * z * sigmoid(z);
        const double difference = y[((int64_t)t * HV + h) * V + i] - expected;
        wrong += difference * difference;
        size += expected * expected;
      }
    }
  }
  return sqrt(wrong / size);
}

#endif
