// Rules that several kernel families share. A rule is about a problem that is valid otherwise, and needs no CUDA: a
// build without it gives the same answers.
#pragma once

#include <climits>
#include <initializer_list>

#include "core/backend.hpp"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda {

// Limits of the kernels' 32-bit arithmetic.
constexpr int64_t kMaxTokens = INT_MAX - (kChunkTokens - 1);  // a position rounded up to whole chunks

// What vector loads and TMA require of q, k, v and o.
constexpr int64_t kRowAlign = 16;  // bytes, of their data and of their strides
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

struct NamedRows {
  const char* name;
  const TokenRows* rows;
};
struct RowRules {
  bool tma = false;           // strides fit a tensor map
  int64_t token_strides = 0;  // more than any token stride may be; 0 = no limit
};
// The type of q, 16-byte alignment, and the strides.
Outcome check_rows(std::initializer_list<NamedRows> list, const Layer& in, const RowRules& rules);

Outcome check_sequences(const Layer& in);  // of kernels for whole sequences
Outcome check_16_bit(const Layer& in);     // and of those for 16-bit inputs
Outcome check_seq_heads(const Layer& in, int64_t most);
Outcome check_chunks(int64_t ctas, int64_t most, int64_t helpers);
Outcome check_small_workspace(const BackwardProblem& p);
// The host does not know which rows are padded, and a padded row would leave gaps in `saved`.
Outcome check_saved_without_padding(const ForwardProblem& p);

}  // namespace gatedelta::cuda
