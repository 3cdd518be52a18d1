// Where the sequences and states of a call are: offsets, slots, padded rows.
#include <algorithm>

#include "testing/number.hpp"
#include "testing/reference.hpp"

namespace gatedelta::testing {

int64_t index_at(const gd_tensor& indices, int64_t i) {
  return indices.dtype == GD_I64 ? static_cast<const int64_t*>(indices.data)[i * indices.stride[0]]
                                 : static_cast<const int32_t*>(indices.data)[i * indices.stride[0]];
}

int64_t slot_at(const gd_inputs& in, const gd_tensor& indices, int64_t row, int64_t column) {
  gd_tensor of_row = indices;
  of_row.data = static_cast<char*>(indices.data) + row * indices.stride[0] * element_bytes(indices.dtype);
  of_row.stride[0] = indices.rank == 2 ? indices.stride[1] : 0;
  const int64_t slot = index_at(of_row, column);
  return slot < in.first_slot ? -1 : slot;
}

int64_t read_slot(const gd_inputs& in, int64_t n) {
  return in.initial_state_indices.dtype == GD_DTYPE_NONE ? n : slot_at(in, in.initial_state_indices, n);
}

int64_t read_slot(const gd_recurrent_args& args, int64_t n) {
  const gd_inputs& in = args.in;
  if (args.previous_accept_lengths.dtype == GD_DTYPE_NONE) return read_slot(in, n);
  const int64_t kept = index_at(args.previous_accept_lengths, n);
  return slot_at(in, in.initial_state_indices, n, std::clamp<int64_t>(kept, 1, in.initial_state_indices.shape[1]) - 1);
}

int64_t step_slot(const gd_recurrent_args& args, int64_t n, const Span& span, int64_t t) {
  if (args.step_indices.shape[0] == 1) return slot_at(args.in, args.step_indices, 0, span.begin + t);
  return slot_at(args.in, args.step_indices, n, t);
}

std::vector<Span> sequence_spans(const gd_inputs& in) {
  std::vector<Span> spans;
  if (in.cu_seqlens.dtype == GD_DTYPE_NONE) {
    for (int64_t b = 0; b < in.q.shape[0]; ++b) spans.push_back({b, 0, in.q.shape[1]});
  } else {
    for (int64_t n = 0; n + 1 < in.cu_seqlens.shape[0]; ++n) {
      const int64_t begin = index_at(in.cu_seqlens, n);
      spans.push_back({0, begin, index_at(in.cu_seqlens, n + 1) - begin});
    }
  }
  return spans;
}

namespace {

bool is_given(const gd_tensor& t) { return t.dtype != GD_DTYPE_NONE; }

// The read slot is null, and so is the write slot; `otherwise` where the call has no write slots.
bool is_padding(const gd_inputs& in, int64_t read, const gd_tensor& final_state_indices, int64_t n, bool otherwise) {
  if (!is_given(in.initial_state_indices) || read >= 0) return false;
  return is_given(final_state_indices) ? slot_at(in, final_state_indices, n) < 0 : otherwise;
}

}  // namespace

bool is_padding(const gd_forward_args& args, int64_t n) {
  return is_padding(args.in, read_slot(args.in, n), args.final_state_indices, n, false);
}

bool is_padding(const gd_recurrent_args& args, int64_t n) {
  const bool stores_states = is_given(args.final_state) || is_given(args.step_states);
  return is_padding(args.in, read_slot(args, n), args.final_state_indices, n, !stores_states);
}

}  // namespace gatedelta::testing
