// Backward of the causal convolution. An item is a tile's channels of all sequences, so every sum over tokens has one
// order. The tiles of a sequence come from the last to the first:
//   dz_t = d_y_t act'(z_t),  dx_t = sum over i of w_i dz_{t + W - 1 - i},  dw_i = sum over t of dz_t x_{t - W + 1 + i}
// dx needs dz of up to W - 1 later tokens; they are carried from tile to tile. After the first tile they give the
// initial state's gradient.
#pragma once

#include "cpu/conv_tile.hpp"
#include "cpu/parallel.hpp"

namespace gatedelta::cpu::GD_ISA {

class Conv1dBackward {
 public:
  Conv1dBackward(const Conv1dBackwardProblem& problem, const Context& context)
      : problem_(problem), context_(context), in_(problem.in) {}

  size_t workspace() const {
    Carver carve;
    ConvWeights weights(carve, in_);
    for (int lane = 0; lane < context_.lanes; ++lane) Lane{carve};
    return carve.used();
  }

  void run() {
    Carver carve(context_.workspace);
    const ConvWeights weights(carve, in_);
    weights.fill(in_);
    Carver measure;
    Lane{measure};
    char* const lanes = carve.take<char>(static_cast<int64_t>(measure.used()) * context_.lanes);
    Context context = context_;
    context.lanes = useful_lanes(in_, context_.lanes);
    const auto body = [&](int lane, int64_t item) {
      Carver own(lanes + measure.used() * static_cast<size_t>(lane));
      switch (in_.taps) {
        case 2: return run_item<2>(Lane{own}, weights, item * kConvChannels);
        case 3: return run_item<3>(Lane{own}, weights, item * kConvChannels);
        default: return run_item<4>(Lane{own}, weights, item * kConvChannels);
      }
    };
    struct Session {};
    for_each_item<Session>(context, (in_.channels + kConvChannels - 1) / kConvChannels, body);
  }

 private:
  struct Lane {
    float *x, *g, *spare;  // tiles of inputs and of gradients
    float* later;          // [W - 1]: dz of the tokens after a tile
    float* sums;           // [W + 1]: dw and, last, db

    explicit Lane(Carver& carve) {
      x = carve.take<float>(kConvTile);
      g = carve.take<float>(kConvTile);
      spare = carve.take<float>(kConvTile);
      later = carve.take<float>((kMaxTaps - 1) * kConvChannels);
      sums = carve.take<float>((kMaxTaps + 1) * kConvChannels);
    }
  };

  template <int kTaps>
  void run_item(const Lane& w, const ConvWeights& weights, int64_t channel) const {
    const int width = static_cast<int>(in_.channels - channel < kConvChannels ? in_.channels - channel : kConvChannels);
    clear_rows(w.sums, kTaps + 1);
    for (int64_t n = 0; n < in_.sequences.count; ++n) run_sequence<kTaps>(w, weights, n, channel, width);
    if (in_.sequences.offsets && problem_.dx) {
      clear_rows(w.g, kConvRows);
      for (int64_t t = in_.sequences.used_tokens(); t < in_.sequences.tokens; t += kConvRows) {
        const int64_t left = in_.sequences.tokens - t;
        store_tile(tokens_of(problem_.dx, 0, t, channel), w.g, w.spare,
                   static_cast<int>(left < kConvRows ? left : kConvRows), width);
      }
    }
    if (const TapWeights& d = problem_.dweight; d)
      for (int i = 0; i < kTaps; ++i)
        for (int c = 0; c < width; ++c)
          store_scalar(d.data, d.dtype, (channel + c) * d.channel_stride + i * d.tap_stride,
                       w.sums[i * kConvChannels + c]);
    if (const HeadVector& d = problem_.dbias; d)
      for (int c = 0; c < width; ++c)
        store_scalar(d.data, d.dtype, (channel + c) * d.stride, w.sums[kTaps * kConvChannels + c]);
  }

  template <int kTaps>
  void run_sequence(const Lane& w, const ConvWeights& weights, int64_t n, int64_t channel, int width) const {
    constexpr int kMost = kConvRows - (kTaps - 1);
    const SequenceSpan span = in_.sequences[n];
    clear_rows(w.later, kTaps - 1);
    for (int64_t tile = (span.length + kMost - 1) / kMost - 1; tile >= 0; --tile) {
      const int64_t t = tile * kMost;
      const int count = static_cast<int>(span.length - t < kMost ? span.length - t : kMost);
      load_inputs(w.x, w.spare, in_, span, in_.initial.slot(n), in_.initial.columns, t - (kTaps - 1), count + kTaps - 1,
                  channel, width);
      load_tile(w.g, w.spare, tokens_of(problem_.d_y, span.batch, span.begin + t, channel), count, width);
      copy_rows(w.g + count * kConvChannels, w.later, kTaps - 1);
      if (in_.silu) {
        activation_gradient<kTaps, true>(w, count, width, weights, channel);
      } else {
        activation_gradient<kTaps, false>(w, count, width, weights, channel);
      }
      copy_rows(w.later, w.g, kTaps - 1);
      if (!problem_.dx) continue;
      input_gradient<kTaps>(w.g, count, width, weights, channel);
      add_final(w, n, span.length, t, count, channel, width);
      store_tile(tokens_of(problem_.dx, span.batch, span.begin + t, channel), w.g, w.spare, count, width);
    }
    if (problem_.d_initial) initial_gradient<kTaps>(w, weights, n, span.length, channel, width);
  }

  static void copy_rows(float* to, const float* from, int rows) {
    for (int i = 0; i < rows * kConvChannels; i += kVector) store(to + i, load(from + i));
  }

  // d_y in w.g becomes dz; sums of dw and db go to w.sums, those of a tile first among themselves.
  template <int kTaps, bool kSilu>
  static void activation_gradient(const Lane& lane, int count, int width, const ConvWeights& weights, int64_t channel) {
    for (int c = 0; c < width; c += kVector) {
      Vec w[kTaps], x[kTaps], dw[kTaps] = {}, db{};
      for (int i = 0; i < kTaps; ++i) w[i] = load(weights.row(i) + channel + c);
      const Vec bias = load(weights.row(kTaps) + channel + c);
      for (int i = 0; i + 1 < kTaps; ++i) x[i] = load(lane.x + i * kConvChannels + c);
      for (int t = 0; t < count; ++t) {
        x[kTaps - 1] = load(lane.x + (t + kTaps - 1) * kConvChannels + c);
        Vec dz = load(lane.g + t * kConvChannels + c);
        if constexpr (kSilu) {
          Vec z = bias;
          for (int i = 0; i < kTaps; ++i) z += w[i] * x[i];
          const Vec s = sigmoid(z);
          dz *= s + z * s * (1.0f - s);
          store(lane.g + t * kConvChannels + c, dz);
        }
        for (int i = 0; i < kTaps; ++i) dw[i] += dz * x[i];
        db += dz;
        for (int i = 0; i + 1 < kTaps; ++i) x[i] = x[i + 1];
      }
      for (int i = 0; i <= kTaps; ++i) {
        float* const sum = lane.sums + i * kConvChannels + c;
        store(sum, load(sum) + (i < kTaps ? dw[i < kTaps ? i : 0] : db));
      }
    }
  }

  // dz becomes dx: row t needs rows t to t + W - 1.
  template <int kTaps>
  static void input_gradient(float* g, int count, int width, const ConvWeights& weights, int64_t channel) {
    for (int c = 0; c < width; c += kVector) {
      Vec w[kTaps], dz[kTaps];
      for (int i = 0; i < kTaps; ++i) w[i] = load(weights.row(i) + channel + c);
      for (int i = 0; i + 1 < kTaps; ++i) dz[i] = load(g + i * kConvChannels + c);
      for (int t = 0; t < count; ++t) {
        dz[kTaps - 1] = load(g + (t + kTaps - 1) * kConvChannels + c);
        Vec dx{};
        for (int i = 0; i < kTaps; ++i) dx += w[i] * dz[kTaps - 1 - i];
        store(g + t * kConvChannels + c, dx);
        for (int i = 0; i + 1 < kTaps; ++i) dz[i] = dz[i + 1];
      }
    }
  }

  // Adds the final state's gradient to rows of w.g: those of inputs [first, first + rows), negative ones the initial
  // state's.
  void add_final(const Lane& w, int64_t n, int64_t length, int64_t first, int rows, int64_t channel, int width) const {
    const ConvStates& d = problem_.d_final;
    const int64_t column = first - (length - d.columns);  // of the first row
    const int skipped = static_cast<int>(column >= 0 ? 0 : -column < rows ? -column : rows);
    if (!d || skipped == rows) return;
    load_tile(w.x, w.spare, columns_of(d, n, channel, column + skipped), rows - skipped, width);
    for (int r = skipped; r < rows; ++r)
      for (int c = 0; c < width; c += kVector) {
        float* const to = w.g + r * kConvChannels + c;
        store(to, load(to) + load(w.x + (r - skipped) * kConvChannels + c));
      }
  }

  template <int kTaps>
  void initial_gradient(const Lane& w, const ConvWeights& weights, int64_t n, int64_t length, int64_t channel,
                        int width) const {
    const ConvStates& d = problem_.d_initial;
    for (int64_t column = 0; column < d.columns; column += kConvRows) {
      const int rows = static_cast<int>(d.columns - column < kConvRows ? d.columns - column : kConvRows);
      const int64_t first = column - d.columns;  // the input of the first row
      clear_rows(w.g, rows);
      for (int64_t p = first < 1 - kTaps ? 1 - kTaps : first; p < first + rows; ++p)
        for (int i = 0; i < kTaps; ++i) {
          const int64_t t = p + kTaps - 1 - i;
          if (t < 0) continue;
          for (int c = 0; c < width; c += kVector) {
            float* const to = w.g + (p - first) * kConvChannels + c;
            store(to, load(to) + load(weights.row(i) + channel + c) * load(w.later + t * kConvChannels + c));
          }
        }
      add_final(w, n, length, first, rows, channel, width);
      store_tile(columns_of(d, n, channel, column), w.g, w.spare, rows, width);
    }
  }

  const Conv1dBackwardProblem& problem_;
  const Context& context_;
  const Conv1dInputs& in_;
};

}  // namespace gatedelta::cpu::GD_ISA
