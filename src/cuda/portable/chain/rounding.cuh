// Rounds operands to 16 bits, with error feedback where prepare has set Prepared::kErrorFeedback.
#pragma once

#include <type_traits>

#include "cuda/portable/chain/chain.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
GD_DEVICE void Chain<Config>::pack_tokens(Operand& to, const Tokens& c) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int n = 0; n < kT; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) to[i][n / 2][n % 2 * 2 + h] = pack<Elem>(c[i][n][2 * h], c[i][n][2 * h + 1]);
}

// The same for an operand that is summed over tokens. Where keys resemble each other, rounding errors add up: a row of
// U is then v_i - v_{i-1}, and 32 rounding errors accumulate in a result of size |v|. In steps with such keys
// (`needs_feedback`) a later token gets the error of an earlier one. NOTE(ptxas): fp16 has three bits more and does not
// need it; but without the branch the forward kernel spills on sm_80, and with bf16's code on sm_90.
template <class Config>
GD_DEVICE void Chain<Config>::pack_with_error_feedback(Operand& to, const Tokens& c, bool needs_feedback) const {
  if (needs_feedback) {
    if constexpr (std::is_same_v<Elem, Bf16>) {
      pack_with_error_feedback_across_lanes(to, c);
    } else {
      pack_with_error_feedback_within_lane(to, c);
    }
  } else {
    pack_tokens(to, c);
  }
}

// Within a lane, which has four tokens of eight: each adds the error of the one before.
template <class Config>
GD_DEVICE void Chain<Config>::pack_with_error_feedback_within_lane(Operand& to, const Tokens& c) {
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float error = 0;
#pragma unroll
      for (int n = 0; n < kT; ++n)
        error = pack_pair(to[i][n / 2][n % 2 * 2 + h], c[i][n][2 * h] + (n % 2 == 0 ? 0 : error), c[i][n][2 * h + 1]);
    }
}

// Across four lanes, which have eight tokens: the last lane's first token adds the errors of the other lanes, and each
// further token of that lane the error of its token before. Not the second token: the last column of N is zero, so an
// error put there would be lost.
template <class Config>
GD_DEVICE void Chain<Config>::pack_with_error_feedback_across_lanes(Operand& to, const Tokens& c) const {
  const bool is_last = t == 3;
#pragma unroll
  for (int i = 0; i < kI; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float error = 0;
#pragma unroll
      for (int n = 0; n < kT; ++n) {
        uint32_t& both = to[i][n / 2][n % 2 * 2 + h];
        const float first = c[i][n][2 * h], second = c[i][n][2 * h + 1];
        float others = pack_pair(both, first, second);
        others = is_last ? 0 : others;
        others += shuffle_xor(others, 1);
        others += shuffle_xor(others, 2);
        error = pack_pair(both, first + (is_last ? error + others : 0), second);
      }
    }
}

// Rounds two tokens of a lane. The second one adds the error of the first one; its own error is returned.
template <class Config>
GD_DEVICE float Chain<Config>::pack_pair(uint32_t& to, float first, float second) {
  const float rounded = unpack<Elem>(pack<Elem>(first, 0.0f)).x;
  second += first - rounded;
  to = pack<Elem>(rounded, second);
  return second - unpack<Elem>(to).y;
}

}  // namespace gatedelta::cuda::portable
