// What offsets and indices hold, where the host can read them.
#include "api/validate/contents.hpp"

#include <algorithm>
#include <cinttypes>

#include "api/error.hpp"
#include "api/validate.hpp"

namespace gatedelta::api {

namespace {

bool same_pool(const StateRows& a, const StateRows& b) {
  return a && b && a.data == b.data && a.dtype == b.dtype && a.slots == b.slots && a.slot_stride == b.slot_stride &&
         a.head_stride == b.head_stride;
}

gd_status check_offsets(const Sequences& sequences) {
  if (!sequences.offsets) return GD_OK;
  const IndexVector& offsets = sequences.offsets;
  if (offsets[0] != 0) return invalid("cu_seqlens[0] is %" PRId64 ", must be 0", offsets[0]);
  for (int64_t n = 0; n < sequences.count; ++n)
    if (offsets[n + 1] < offsets[n])
      return invalid("cu_seqlens[%" PRId64 "] is %" PRId64 ", less than the %" PRId64 " before it", n + 1,
                     offsets[n + 1], offsets[n]);
  if (offsets[sequences.count] > sequences.tokens)
    return invalid("cu_seqlens ends at %" PRId64 ", past the T = %" PRId64 " tokens there are",
                   offsets[sequences.count], sequences.tokens);
  return GD_OK;
}

gd_status check_range(const char* name, const IndexVector& indices, int64_t count, const char* pool, int64_t slots) {
  if (!indices) return GD_OK;
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] >= slots)
      return invalid("%s[%" PRId64 "] is %" PRId64 ", but %s has %" PRId64 " slots", name, i, indices[i], pool, slots);
  return GD_OK;
}

// The states a call writes: one per sequence at its end, and a series of them, one for every `every` tokens.
// The series (checkpoints or steps) is packed sequence by sequence.
struct StateWrites {
  const StateRows& final;
  const char* series_name;
  const StateRows& series;
  const char* series_index_name;
  int64_t every;

  int64_t entries(const Layer& in, int64_t n) const { return every ? in.sequences[n].length / every : 0; }
};

StateWrites writes_of(const ForwardProblem& p) {
  return {p.final, "checkpoints", p.checkpoints, "checkpoint_indices", p.checkpoint_every};
}
StateWrites writes_of(const RecurrentProblem& p) { return {p.final, "step_states", p.step_states, "step_indices", 1}; }

int64_t count_entries(const Layer& in, const StateWrites& writes) {
  if (!in.sequences.offsets) return in.sequences.count * (in.sequences.tokens / writes.every);
  int64_t entries = 0;
  for (int64_t n = 0; n < in.sequences.count; ++n) entries += writes.entries(in, n);
  return entries;
}

template <class Problem>
size_t bitmap_bytes(const Problem& p) {
  const StateWrites w = writes_of(p);
  if (!p.in.initial.indices && !w.final.indices && !w.series.indices) return 0;
  const int64_t slots = std::max(w.final.slots, w.series.indices ? w.series.slots : 0);
  return static_cast<size_t>((slots + 511) / 512) * 64;
}

// No slot of `pool` is written twice, and none that one sequence reads is written by another.
// Several sequences may read one slot, and a sequence may overwrite the slot it starts from.
template <class Problem>
gd_status check_slots(const Problem& p, const StateRows& pool, uint64_t* bitmap) {
  const StateWrites writes = writes_of(p);
  const Layer& in = p.in;
  const bool reads = same_pool(pool, in.initial), finals = same_pool(pool, writes.final);
  const bool series = writes.series.indices && same_pool(pool, writes.series);
  const auto word = [&](int64_t slot) -> uint64_t& { return bitmap[slot / 64]; };
  const auto bit = [](int64_t slot) { return uint64_t{1} << slot % 64; };

  // visit(array, position, slot) for every slot sequence n writes in this pool; its series starts at `entry`.
  const auto each_write = [&](int64_t n, int64_t entry, auto&& visit) -> gd_status {
    if (finals && p.final.slot(n) >= 0) GD_TRY(visit("final_indices", n, p.final.slot(n)));
    for (int64_t i = entry; series && i < entry + writes.entries(in, n); ++i)
      if (writes.series.indices[i] >= 0) GD_TRY(visit(writes.series_index_name, i, writes.series.indices[i]));
    return GD_OK;
  };
  // body(n, entry) for every sequence that is no padded row.
  const auto each_sequence = [&](auto&& body) -> gd_status {
    for (int64_t n = 0, entry = 0; n < in.sequences.count; entry += writes.entries(in, n++))
      if (!p.is_padding(n)) GD_TRY(body(n, entry));
    return GD_OK;
  };

  // Clears only the words it will look at: a call uses a few slots of a pool that may have millions.
  GD_TRY(each_sequence([&](int64_t n, int64_t entry) {
    if (reads && in.initial.slot(n) >= 0) word(in.initial.slot(n)) = 0;
    return each_write(n, entry, [&](const char*, int64_t, int64_t slot) { return word(slot) = 0, GD_OK; });
  }));
  GD_TRY(each_sequence([&](int64_t n, int64_t entry) {
    return each_write(n, entry, [&](const char* array, int64_t i, int64_t slot) {
      if (word(slot) & bit(slot))
        return invalid("%s[%" PRId64 "]: slot %" PRId64 " is written more than once", array, i, slot);
      word(slot) |= bit(slot);
      return GD_OK;
    });
  }));
  return each_sequence([&](int64_t n, int64_t entry) {
    const int64_t slot = reads ? in.initial.slot(n) : -1;
    if (slot < 0 || !(word(slot) & bit(slot))) return GD_OK;
    bool own = false;
    each_write(n, entry, [&](const char*, int64_t, int64_t written) { return own |= written == slot, GD_OK; });
    if (own) return GD_OK;
    return invalid("sequence %" PRId64 " starts from slot %" PRId64 ", which another sequence writes in place", n,
                   slot);
  });
}

template <class Problem>
gd_status check_states(const Problem& p, uint64_t* bitmap) {
  const StateWrites w = writes_of(p);
  const int64_t sequences = p.in.sequences.count;
  GD_TRY(check_range("initial_indices", p.in.initial.indices, sequences, "initial_state", p.in.initial.slots));
  GD_TRY(check_range("final_indices", w.final.indices, sequences, "final_state", w.final.slots));
  if (w.series.indices)
    GD_TRY(check_range(w.series_index_name, w.series.indices, count_entries(p.in, w), w.series_name, w.series.slots));
  if (!bitmap) return GD_OK;
  if (w.final) GD_TRY(check_slots(p, w.final, bitmap));
  if (w.series.indices && !same_pool(w.series, w.final)) GD_TRY(check_slots(p, w.series, bitmap));
  return GD_OK;
}

}  // namespace

gd_status check_checkpoint_count(const ForwardProblem& p) {
  if (!p.checkpoints) return GD_OK;
  const int64_t entries = count_entries(p.in, writes_of(p));
  const char* name = p.checkpoints.indices ? "checkpoint_indices" : "checkpoints";
  if (entries <= p.checkpoint_room) return GD_OK;
  return invalid("%s has %" PRId64 " entries, but the sequences have %" PRId64 " checkpoints", name, p.checkpoint_room,
                 entries);
}

size_t slot_bitmap_bytes(const ForwardProblem& p) { return bitmap_bytes(p); }
size_t slot_bitmap_bytes(const BackwardProblem&) { return 0; }  // writes no pool
size_t slot_bitmap_bytes(const RecurrentProblem& p) { return bitmap_bytes(p); }

gd_status validate_contents(const ForwardProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  if (p.in.sequences.offsets) GD_TRY(check_checkpoint_count(p));
  GD_TRY(check_states(p, bitmap));
  // A backward could not tell which parts of `saved` the forward left out.
  for (int64_t n = 0; p.saved && n < p.in.sequences.count; ++n)
    if (p.is_padding(n))
      return invalid("saved is given, but sequence %" PRId64 " is a padded row (its read and write slots are negative)",
                     n);
  return GD_OK;
}

gd_status validate_contents(const BackwardProblem& p, uint64_t*) {
  GD_TRY(check_offsets(p.in.sequences));
  return check_range("initial_indices", p.in.initial.indices, p.in.sequences.count, "initial_state",
                     p.in.initial.slots);
}

gd_status validate_contents(const RecurrentProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  for (int64_t n = 0; p.accept_lengths && n < p.in.sequences.count; ++n) {
    const int64_t accepted = p.accept_lengths[n], length = p.in.sequences[n].length;
    if (!p.is_padding(n) && (accepted < 0 || accepted > length))
      return invalid("accept_lengths[%" PRId64 "] is %" PRId64 ", must be from 0 to the sequence's %" PRId64 " tokens",
                     n, accepted, length);
  }
  return check_states(p, bitmap);
}

}  // namespace gatedelta::api
