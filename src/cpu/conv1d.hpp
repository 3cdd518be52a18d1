// The causal convolution. An item is one sequence in a range of channels; it goes through its tokens tile by tile:
//   z_t = b + sum over i of w_i x_{t - W + 1 + i},  y_t = act(z_t)
// Inputs are read again where tiles overlap, so nothing is carried from tile to tile. The state is written last: an
// item alone reads and writes its channels of it.
#pragma once

#include "cpu/conv_tile.hpp"
#include "cpu/parallel.hpp"

namespace gatedelta::cpu::GD_ISA {

class Conv1d {
 public:
  Conv1d(const Conv1dProblem& problem, const Context& context)
      : problem_(problem), context_(context), in_(problem.in) {}

  size_t workspace() const {
    Carver carve;
    ConvWeights weights(carve, in_);
    for (int lane = 0; lane < context_.lanes; ++lane) carve.take<float>(2 * kConvTile);
    return carve.used();
  }

  void run() {
    Carver carve(context_.workspace);
    const ConvWeights weights(carve, in_);
    weights.fill(in_);
    float* const tiles = carve.take<float>(context_.lanes * 2 * int64_t{kConvTile});
    Context context = context_;
    context.lanes = useful_lanes(in_, context_.lanes);
    // Tokens past the last offset count as one more sequence.
    const int64_t sequences = in_.sequences.count + (in_.sequences.offsets ? 1 : 0);
    const int64_t range = kConvChannels * tiles_per_item(in_.channels, sequences, context.lanes);
    const int64_t ranges = (in_.channels + range - 1) / range;
    const auto body = [&](int lane, int64_t item) {
      const int64_t begin = item % ranges * range;
      const int64_t end = begin + range < in_.channels ? begin + range : in_.channels;
      run_item(weights, tiles + lane * 2 * int64_t{kConvTile}, item / ranges, begin, end);
    };
    struct Session {};
    for_each_item<Session>(context, sequences * ranges, body);
  }

 private:
  void run_item(const ConvWeights& weights, float* tile, int64_t n, int64_t begin, int64_t end) const {
    float* const spare = tile + kConvTile;
    if (n == in_.sequences.count) {
      const int64_t used = in_.sequences.used_tokens();
      return clear(tile, {0, used, in_.sequences.tokens - used}, begin, end);
    }
    const SequenceSpan span = in_.sequences[n];
    if (problem_.is_padding(n)) return clear(tile, span, begin, end);
    const int64_t slot = in_.initial.slot(n), history_end = problem_.history_end(n);
    const int64_t most = kConvRows - (in_.taps - 1);
    for (int64_t t = 0; t < span.length && (problem_.y || problem_.steps); t += most) {
      const int count = static_cast<int>(span.length - t < most ? span.length - t : most);
      for (int64_t channel = begin; channel < end; channel += kConvChannels) {
        const int width = static_cast<int>(end - channel < kConvChannels ? end - channel : kConvChannels);
        load_inputs(tile, spare, in_, span, slot, history_end, t - (in_.taps - 1), count + in_.taps - 1, channel,
                    width);
        for (int i = 0; problem_.steps && i < count; ++i)
          store_tile(window_of(problem_.steps, span.batch, span.begin + t + i, channel), tile + (i + 1) * kConvChannels,
                     spare, in_.taps - 1, width);
        if (!problem_.y) continue;
        convolve(tile, count, width, weights, channel);
        store_tile(tokens_of(problem_.y, span.batch, span.begin + t, channel), tile, spare, count, width);
      }
    }
    if (const int64_t to = problem_.final.slot(n); to >= 0) store_state(tile, n, span, slot, to, begin, end);
  }

  void clear(float* tile, const SequenceSpan& span, int64_t begin, int64_t end) const {
    if (!problem_.y) return;
    clear_rows(tile, kConvRows);
    for (int64_t t = 0; t < span.length; t += kConvRows) {
      const int count = static_cast<int>(span.length - t < kConvRows ? span.length - t : kConvRows);
      for (int64_t channel = begin; channel < end; channel += kConvChannels) {
        const int width = static_cast<int>(end - channel < kConvChannels ? end - channel : kConvChannels);
        const ConvRows to = tokens_of(problem_.y, span.batch, span.begin + t, channel);
        store_tile(to, tile, tile + kConvTile, count, width);
      }
    }
  }

  // In place, a column's number comes from a column that is written later, or from x.
  void store_state(float* tile, int64_t n, const SequenceSpan& span, int64_t from, int64_t to, int64_t begin,
                   int64_t end) const {
    const FinalColumns source = problem_.final_columns(n, span.length);
    for (int64_t channel = begin; channel < end; channel += kConvChannels) {
      const int width = static_cast<int>(end - channel < kConvChannels ? end - channel : kConvChannels);
      for (int64_t column = 0; column < source.columns; column += kConvRows) {
        const int count = static_cast<int>(source.columns - column < kConvRows ? source.columns - column : kConvRows);
        load_inputs(tile, tile + kConvTile, in_, span, from, source.history_end, source.first_input + column, count,
                    channel, width);
        store_tile(columns_of(problem_.final, to, channel, column), tile, tile + kConvTile, count, width);
      }
    }
  }

  void convolve(float* tile, int count, int width, const ConvWeights& weights, int64_t channel) const {
    switch (in_.taps) {
      case 2: return convolve<2>(tile, count, width, weights, channel);
      case 3: return convolve<3>(tile, count, width, weights, channel);
      default: return convolve<4>(tile, count, width, weights, channel);
    }
  }
  template <int kTaps>
  void convolve(float* tile, int count, int width, const ConvWeights& weights, int64_t channel) const {
    if (in_.silu) {
      convolve<kTaps, true>(tile, count, width, weights, channel);
    } else {
      convolve<kTaps, false>(tile, count, width, weights, channel);
    }
  }

  // Row t of the tile becomes y_t; it held x_{t - W + 1}, which no later output needs.
  template <int kTaps, bool kSilu>
  static void convolve(float* tile, int count, int width, const ConvWeights& weights, int64_t channel) {
    for (int c = 0; c < width; c += kVector) {
      Vec w[kTaps], x[kTaps];
      for (int i = 0; i < kTaps; ++i) w[i] = load(weights.row(i) + channel + c);
      const Vec bias = load(weights.row(kTaps) + channel + c);
      for (int i = 0; i + 1 < kTaps; ++i) x[i] = load(tile + i * kConvChannels + c);
      for (int t = 0; t < count; ++t) {
        x[kTaps - 1] = load(tile + (t + kTaps - 1) * kConvChannels + c);
        Vec z = bias;
        for (int i = 0; i < kTaps; ++i) z += w[i] * x[i];
        store(tile + t * kConvChannels + c, kSilu ? z * sigmoid(z) : z);
        for (int i = 0; i + 1 < kTaps; ++i) x[i] = x[i + 1];
      }
    }
  }

  const Conv1dProblem& problem_;
  const Context& context_;
  const Conv1dInputs& in_;
};

}  // namespace gatedelta::cpu::GD_ISA
