// What offsets and indices hold, where the host can read them.
#include "api/validate/contents.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "api/error.hpp"
#include "api/validate.hpp"

namespace gatedelta::api {

namespace {

bool same_pool(const StateRows& a, const StateRows& b) {
  return a && b && a.data == b.data && a.dtype == b.dtype && a.slots == b.slots && a.slot_stride == b.slot_stride &&
         a.head_stride == b.head_stride;
}

}  // namespace

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

gd_status check_range(const char* name, const IndexRows& indices, int64_t count, const char* pool, int64_t slots) {
  if (!indices) return GD_OK;
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] >= slots)
      return invalid("%s[%" PRId64 "] is %" PRId64 ", but %s has %" PRId64 " slots", name, i, indices[i], pool, slots);
  return GD_OK;
}

namespace {

// Where an index stands, as messages name it: "step_indices[1, 3]".
struct IndexPlace {
  const char* array;
  int64_t row, column;  // column: negative in an array of one dimension

  struct Text {
    char text[96];
  };
  Text name() const {
    Text t;
    if (column < 0) {
      std::snprintf(t.text, sizeof t.text, "%s[%" PRId64 "]", array, row);
    } else {
      std::snprintf(t.text, sizeof t.text, "%s[%" PRId64 ", %" PRId64 "]", array, row, column);
    }
    return t;
  }
};

gd_status check_range(const IndexPlace& place, int64_t slot, const char* pool, int64_t slots) {
  if (slot < slots) return GD_OK;
  return invalid("%s is %" PRId64 ", but %s has %" PRId64 " slots", place.name().text, slot, pool, slots);
}

// Besides one state per sequence at its end, a call writes a series of them: checkpoints or steps.
struct Series {
  const char* name;
  const StateRows& states;
};
Series series_of(const ForwardProblem& p) { return {"checkpoints", p.checkpoints}; }
Series series_of(const RecurrentProblem& p) { return {"step_states", p.step_states}; }

int64_t series_length(const ForwardProblem& p, int64_t n) {
  if (p.checkpoint_offsets) return p.checkpoint_offsets[n] > 0 ? 1 : 0;
  return p.checkpoint_every ? p.in.sequences[n].length / p.checkpoint_every : 0;
}
int64_t series_length(const RecurrentProblem& p, int64_t n) { return p.in.sequences[n].length; }

// Where the slot of entry i of sequence n stands. `before`: entries of all sequences before.
IndexPlace series_place(const ForwardProblem& p, int64_t n, int64_t before, int64_t i) {
  return {"checkpoint_indices", p.checkpoint_offsets ? n : before + i, -1};
}
IndexPlace series_place(const RecurrentProblem& p, int64_t n, int64_t before, int64_t i) {
  if (p.steps_by_token) return {"step_indices", 0, before + i};
  return {"step_indices", n, i};
}

IndexPlace read_place(const ForwardProblem&, int64_t n) { return {"initial_state_indices", n, -1}; }
IndexPlace read_place(const RecurrentProblem& p, int64_t n) {
  return {"initial_state_indices", n, p.previous_accept_lengths ? p.read_column(n) : -1};
}

template <class Problem>
size_t bitmap_bytes(const Problem& p) {
  const StateRows& series = series_of(p).states;
  if (!p.in.initial.indices && !p.final.indices && !series.indices) return 0;
  const int64_t slots = std::max(p.final.slots, series.indices ? series.slots : 0);
  return static_cast<size_t>((slots + 511) / 512) * 64;
}

// body(n, before) for every sequence that is no padded row.
template <class Problem, class Body>
gd_status each_sequence(const Problem& p, Body&& body) {
  for (int64_t n = 0, before = 0; n < p.in.sequences.count; before += series_length(p, n++))
    if (!p.is_padding(n)) GD_TRY(body(n, before));
  return GD_OK;
}
// visit(place, slot) for every slot of the series that sequence n writes.
template <class Problem, class Visit>
gd_status each_of_series(const Problem& p, int64_t n, int64_t before, Visit&& visit) {
  const StateRows& states = series_of(p).states;
  for (int64_t i = 0, length = series_length(p, n); i < length; ++i) {
    const IndexPlace place = series_place(p, n, before, i);
    const int64_t slot = states.resolve(states.indices(place.row, place.column < 0 ? 0 : place.column));
    if (slot >= 0) GD_TRY(visit(place, slot));
  }
  return GD_OK;
}

// No slot of `pool` is written twice, and none that one sequence reads is written by another.
// Several sequences may read one slot, and a sequence may overwrite the slot it starts from.
template <class Problem>
gd_status check_slots(const Problem& p, const StateRows& pool, uint64_t* bitmap) {
  const StateRows& states = series_of(p).states;
  const bool reads = same_pool(pool, p.in.initial), finals = same_pool(pool, p.final);
  const bool series = states.indices && same_pool(pool, states);
  const auto word = [&](int64_t slot) -> uint64_t& { return bitmap[slot / 64]; };
  const auto bit = [](int64_t slot) { return uint64_t{1} << (static_cast<uint64_t>(slot) % 64); };

  // visit(place, slot) for every slot sequence n writes in this pool.
  const auto each_write = [&](int64_t n, int64_t before, auto&& visit) -> gd_status {
    if (finals && p.final.slot(n) >= 0) GD_TRY(visit({"final_state_indices", n, -1}, p.final.slot(n)));
    return series ? each_of_series(p, n, before, visit) : GD_OK;
  };

  // Clears only the words it will look at: a call uses a few slots of a pool that may have millions.
  GD_TRY(each_sequence(p, [&](int64_t n, int64_t before) {
    if (reads && p.read_slot(n) >= 0) word(p.read_slot(n)) = 0;
    return each_write(n, before, [&](const IndexPlace&, int64_t slot) { return word(slot) = 0, GD_OK; });
  }));
  GD_TRY(each_sequence(p, [&](int64_t n, int64_t before) {
    return each_write(n, before, [&](const IndexPlace& place, int64_t slot) {
      if (word(slot) & bit(slot))
        return invalid("%s: slot %" PRId64 " is written more than once", place.name().text, slot);
      word(slot) |= bit(slot);
      return GD_OK;
    });
  }));
  return each_sequence(p, [&](int64_t n, int64_t before) {
    const int64_t slot = reads ? p.read_slot(n) : -1;
    if (slot < 0 || !(word(slot) & bit(slot))) return GD_OK;
    bool own = false;
    each_write(n, before, [&](const IndexPlace&, int64_t written) { return own |= written == slot, GD_OK; });
    if (own) return GD_OK;
    return invalid("sequence %" PRId64 " starts from slot %" PRId64 ", which another sequence writes in place", n,
                   slot);
  });
}

template <class Problem>
gd_status check_states(const Problem& p, uint64_t* bitmap) {
  const Series series = series_of(p);
  for (int64_t n = 0; p.in.initial.indices && n < p.in.sequences.count; ++n)
    GD_TRY(check_range(read_place(p, n), p.read_slot(n), "initial_state", p.in.initial.slots));
  for (int64_t n = 0; p.final.indices && n < p.in.sequences.count; ++n)
    GD_TRY(check_range({"final_state_indices", n, -1}, p.final.slot(n), "final_state", p.final.slots));
  if (series.states.indices)
    GD_TRY(each_sequence(p, [&](int64_t n, int64_t before) {
      return each_of_series(p, n, before, [&](const IndexPlace& place, int64_t slot) {
        return check_range(place, slot, series.name, series.states.slots);
      });
    }));
  if (!bitmap) return GD_OK;
  if (p.final) GD_TRY(check_slots(p, p.final, bitmap));
  if (series.states.indices && !same_pool(series.states, p.final)) GD_TRY(check_slots(p, series.states, bitmap));
  return GD_OK;
}

}  // namespace

gd_status check_checkpoint_count(const ForwardProblem& p) {
  if (!p.checkpoint_every) return GD_OK;
  int64_t entries = 0;
  if (!p.in.sequences.offsets) {
    entries = p.in.sequences.count * (p.in.sequences.tokens / p.checkpoint_every);
  } else {
    for (int64_t n = 0; n < p.in.sequences.count; ++n) entries += series_length(p, n);
  }
  const char* name = p.checkpoints.indices ? "checkpoint_indices" : "checkpoints";
  if (entries <= p.checkpoint_room) return GD_OK;
  return invalid("%s has %" PRId64 " entries, but the sequences have %" PRId64 " checkpoints", name, p.checkpoint_room,
                 entries);
}

size_t slot_bitmap_bytes(const ForwardProblem& p) { return bitmap_bytes(p); }
size_t slot_bitmap_bytes(const BackwardProblem& p) {
  return p.d_initial.indices ? static_cast<size_t>((p.d_initial.slots + 511) / 512) * 64 : 0;
}
size_t slot_bitmap_bytes(const RecurrentProblem& p) { return bitmap_bytes(p); }

gd_status validate_contents(const ForwardProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  for (int64_t n = 0; p.checkpoint_offsets && n < p.in.sequences.count; ++n) {
    const int64_t offset = p.checkpoint_offsets[n], length = p.in.sequences[n].length;
    if (!p.is_padding(n) && offset > 0 && (offset % kChunk != 0 || offset > length))
      return invalid("checkpoint_offsets[%" PRId64 "] is %" PRId64
                     ", must be a multiple of %d and at most the sequence's %" PRId64 " tokens, or 0",
                     n, offset, kChunk, length);
  }
  if (p.in.sequences.offsets) GD_TRY(check_checkpoint_count(p));
  GD_TRY(check_states(p, bitmap));
  // A backward could not tell which parts of `saved` the forward left out.
  for (int64_t n = 0; p.saved && n < p.in.sequences.count; ++n)
    if (p.is_padding(n))
      return invalid("saved is given, but sequence %" PRId64 " is a padded row (its read and write slots are null)", n);
  return GD_OK;
}

gd_status validate_contents(const BackwardProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  const int64_t count = p.in.sequences.count;
  for (int64_t n = 0; p.in.initial.indices && n < count; ++n)
    GD_TRY(check_range({"initial_state_indices", n, -1}, p.in.initial.slot(n), "initial_state", p.in.initial.slots));
  for (int64_t n = 0; p.d_final.indices && n < count; ++n)
    GD_TRY(check_range({"dht_indices", n, -1}, p.d_final.slot(n), "dht", p.d_final.slots));
  if (!p.d_initial.indices) return GD_OK;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = p.d_initial.slot(n);
    GD_TRY(check_range({"d_initial_state_indices", n, -1}, row, "d_initial_state", p.d_initial.slots));
    if (row >= 0) bitmap[row / 64] = 0;
  }
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = p.d_initial.slot(n);
    if (row < 0) continue;
    const uint64_t bit = uint64_t{1} << (static_cast<uint64_t>(row) % 64);
    if (bitmap[row / 64] & bit)
      return invalid("d_initial_state_indices[%" PRId64 "]: slot %" PRId64 " is written more than once", n, row);
    bitmap[row / 64] |= bit;
  }
  return GD_OK;
}

gd_status validate_contents(const SummaryProblem& p, uint64_t*) { return check_offsets(p.in.sequences); }
gd_status validate_contents(const BackwardSummaryProblem& p, uint64_t*) { return check_offsets(p.in.sequences); }

gd_status validate_contents(const MergeProblem& p, uint64_t*) {
  for (int64_t r = 0; r < p.results; ++r) {
    const int64_t first = p.first[r], count = p.count[r];
    if (count > 0 && (first < 0 || first > p.segments - count))
      return invalid("first[%" PRId64 "] and count[%" PRId64 "] are %" PRId64 " and %" PRId64 ", but there are %" PRId64
                     " segments",
                     r, r, first, count, p.segments);
  }
  return GD_OK;
}

gd_status validate_contents(const RecurrentProblem& p, uint64_t* bitmap) {
  GD_TRY(check_offsets(p.in.sequences));
  for (int64_t n = 0; p.accept_lengths && n < p.in.sequences.count; ++n) {
    const int64_t accepted = p.accept_lengths[n], length = p.in.sequences[n].length;
    if (!p.is_padding(n) && (accepted < 0 || accepted > length))
      return invalid("accept_lengths[%" PRId64 "] is %" PRId64 ", must be from 0 to the sequence's %" PRId64 " tokens",
                     n, accepted, length);
  }
  const IndexRows& steps = p.step_states.indices;
  for (int64_t n = 0; steps && !p.steps_by_token && n < p.in.sequences.count; ++n)
    if (!p.is_padding(n) && p.in.sequences[n].length > steps.columns)
      return invalid("step_indices has rows of %" PRId64 " slots, but sequence %" PRId64 " has %" PRId64 " tokens",
                     steps.columns, n, p.in.sequences[n].length);
  return check_states(p, bitmap);
}

}  // namespace gatedelta::api
