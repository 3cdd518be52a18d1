// Calls that go on with each other's results: decode over a pool, and the stages of context parallelism.
#include <numeric>

#include "draw.hpp"
#include "testing/contents.hpp"
#include "testing/judge.hpp"

namespace gatedelta::soak {

using testing::Case;
using testing::Problem;

gd_tensor Extras::make(gd_dtype dtype, const std::vector<int64_t>& shape) {
  gd_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int64_t step = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.shape[axis] = shape[static_cast<size_t>(axis)];
    t.stride[axis] = step;
    step *= t.shape[axis];
  }
  t.data = bytes(static_cast<size_t>(step * testing::element_bytes(dtype)));
  return t;
}

gd_tensor Extras::indices(const std::vector<int64_t>& values, std::vector<int64_t> shape) {
  if (shape.empty()) shape = {std::ssize(values)};
  const gd_tensor t = make(GD_I32, shape);
  testing::fill(t, [&](int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); });
  return t;
}

namespace {

constexpr int64_t kColumns = 4;  // slots of a sequence: states after up to so many tokens

gd_tensor slot_of(const gd_tensor& pool, int64_t slot) {
  gd_tensor one = pool;
  one.shape[0] = 1;
  one.data = static_cast<char*>(pool.data) + slot * pool.stride[0] * testing::element_bytes(pool.dtype);
  return one;
}

// Slots by sequence, and which of them holds the state that the next step goes on with.
struct Chain {
  Case c;
  gd_tensor pool;
  std::vector<int64_t> slots;  // [N, kColumns]
  std::vector<int64_t> kept;   // tokens that the last draft kept, from 1: the slot is in column kept - 1
  Extras& extras;

  int64_t N() const { return std::ssize(kept); }

  // The next step as an engine makes it. `inputs` are its own tokens.
  gd_recurrent_args next(gd_recurrent_args args, int64_t tokens, Dice& dice) {
    args.in.initial_state = pool;
    if (tokens > 1 && dice.one_in(2)) {  // every state is stored, and the next step picks one
      std::vector<int64_t> places;
      for (int64_t n = 0; n < N(); ++n)
        places.insert(places.end(), slots.begin() + n * kColumns, slots.begin() + n * kColumns + tokens);
      args.in.initial_state_indices = extras.indices(slots, {N(), kColumns});
      args.previous_accept_lengths = extras.indices(kept);
      args.step_states = pool;
      args.step_indices = extras.indices(places, {N(), tokens});
      for (int64_t& k : kept) k = 1 + dice.below(tokens);
      return args;
    }
    std::vector<int64_t> current, accepted;
    for (int64_t n = 0; n < N(); ++n) {
      current.push_back(slots[static_cast<size_t>(n * kColumns + kept[static_cast<size_t>(n)] - 1)]);
      accepted.push_back(dice.below(tokens + 1));
    }
    if (dice.one_in(3)) current[static_cast<size_t>(dice.below(N()))] = -1;  // a padded row
    args.in.initial_state_indices = args.final_state_indices = extras.indices(current);
    args.final_state = pool;
    if (dice.one_in(2)) args.accept_lengths = extras.indices(accepted);
    if (dice.one_in(8)) args.out = {};  // a commit
    return args;
  }
};

}  // namespace

Made draw_decode_chain(Dice& dice, const Target& target, const OwnSlots* shared) {
  Case c = draw_layer(dice, target);
  c.pool = c.inplace = c.h0 = c.ht = c.strided = false;
  c.first_slot = 0;
  c.B = 1 + dice.below(target.cuda ? 8 : 4);
  Extras extras;
  Chain chain{.c = c, .pool = {}, .slots = {}, .kept = {}, .extras = extras};
  if (shared) {
    c.Hk = c.Hv = 2;
    c.K = c.V = 32;
    c.state = GD_F32;
    c.B = std::ssize(shared->slots) / kColumns;
    chain.pool = shared->pool;
    chain.slots = shared->slots;
  } else {
    const int64_t count = c.B * kColumns + 3;  // three of them stay NaN
    const bool kv = c.layout == GD_STATE_KV;
    chain.pool = extras.make(c.state, {count, c.Hv, kv ? c.K : c.V, kv ? c.V : c.K});
    chain.slots = dice.permutation(count);
    chain.slots.resize(static_cast<size_t>(c.B * kColumns));
  }
  chain.kept.assign(static_cast<size_t>(c.B), 1);
  for (int64_t n = 0; n < c.B; ++n) {
    testing::fill(slot_of(chain.pool, chain.slots[static_cast<size_t>(n * kColumns)]), [&](int64_t i) {
      return 0.3 * testing::normal(c.seed, 200, static_cast<uint64_t>(n * c.Hv * c.K * c.V + i));
    });
  }
  const gd_exec exec = draw_exec(dice, target);
  Steps steps;
  std::list<Problem> problems;
  const int64_t count = target.cuda ? 20 : 8;
  for (int64_t i = 0; i < count; ++i) {
    c.T = dice.one_in(2) ? 1 : 2 + dice.below(kColumns - 1);
    c.seed += 1;
    steps.add(chain.next(problems.emplace_back(c).recurrent, c.T, dice), exec);
  }
  const std::string text = std::to_string(count) + " steps like " + testing::describe(c);
  if (!shared) return std::make_unique<Call>(Operation::decode_chain, text, steps.take());

  const size_t bytes = extent_bytes(slot_of(chain.pool, 0));
  std::vector<Call::Outside> outside;
  for (const int64_t slot : shared->slots) {
    char* const live = static_cast<char*>(slot_of(chain.pool, slot).data);
    outside.push_back({live, {live, live + bytes}, {}});
  }
  return std::make_unique<Call>(Operation::decode_chain, "shared pool: " + text, steps.take(),
                                std::span<const char>(static_cast<char*>(chain.pool.data), extent_bytes(chain.pool)),
                                std::move(outside));
}

Made draw_context_parallel(Dice& dice, const Target& target) {
  Case c = draw_layer(dice, target);
  c.pool = c.inplace = c.h0 = c.ht = c.dht = false;
  c.first_slot = 0;
  c.strided = c.strided && !target.cuda;
  if (target.cuda && c.dtype == GD_F32) c.dtype = GD_BF16;
  const int64_t P = 1 + dice.below(4);
  for (int64_t i = 0; i < P; ++i) c.lengths.push_back(dice.of<int64_t>({64, 65, 1 + dice.below(200)}));
  const Problem problem(c);
  const bool kv = c.layout == GD_STATE_KV;
  const std::vector<int64_t> states = {P, c.Hv, kv ? c.K : c.V, kv ? c.V : c.K};
  Extras extras;

  gd_summary_args summary = GD_SUMMARY_ARGS_INIT;
  summary.in = problem.forward.in;
  summary.in.q = {};
  summary.in.has_scale = 0;
  summary.in.scale = 0;
  summary.local_state = extras.make(GD_F32, states);
  summary.transition = extras.make(GD_F32, {P, c.Hv, c.K, c.K});
  summary.fade = extras.make(GD_F32, {P, c.Hv});
  summary.skip_faded = dice.one_in(2);

  gd_backward_summary_args backward = GD_BACKWARD_SUMMARY_ARGS_INIT;
  backward.in = problem.backward.in;
  backward.in.v = {};
  backward.do_ = problem.backward.do_;
  backward.d_local = extras.make(GD_F32, states);
  backward.skip_faded = summary.skip_faded;

  // The states at the beginnings of all segments, and the gradients at their ends.
  std::vector<int64_t> before(static_cast<size_t>(P), 0), counts(static_cast<size_t>(P)), after, rest;
  std::iota(counts.begin(), counts.end(), 0);
  for (int64_t i = 0; i < P; ++i) after.push_back(std::min(i + 1, P - 1)), rest.push_back(P - 1 - i);
  const auto merge = [&](const gd_tensor& values, const std::vector<int64_t>& first, const std::vector<int64_t>& count,
                         bool transposed) {
    gd_merge_args args = GD_MERGE_ARGS_INIT;
    args.values = values;
    args.transitions = summary.transition;
    args.first = extras.indices(first);
    args.count = extras.indices(count);
    args.state = extras.make(GD_F32, states);
    args.transposed = transposed;
    args.state_layout = c.layout;
    return args;
  };
  const gd_exec exec = draw_exec(dice, target);
  Steps steps;
  steps.add(summary, exec).add(merge(summary.local_state, before, counts, false), exec);
  steps.add(backward, exec).add(merge(backward.d_local, after, rest, true), exec);
  return std::make_unique<Call>(Operation::context_parallel, testing::describe(c), steps.take());
}

}  // namespace gatedelta::soak
