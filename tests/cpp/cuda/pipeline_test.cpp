// A model of how the main kernel's warpgroups hand slots to each other (src/cuda/forward/kernel.cuh, and for the other
// passes src/cuda/backward/states.cuh and chain.cuh): rings, barriers and who arrives where, with everything else left
// out. Run in random order it must end, and nobody may ever see a stage
// that holds another chunk than the one expected.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "cuda/sm90/chain/config.hpp"

namespace gatedelta::cuda {
namespace {

constexpr int kNothing = -1, kEndOfWork = -2;

struct Barrier {
  int expected, pending, completed = 0;
  explicit Barrier(int count) : expected(count), pending(count) {}
  void arrive() {
    ASSERT_GT(pending, 0);
    if (--pending == 0) {
      ++completed;
      pending = expected;
    }
  }
  bool passed(uint32_t phase) const { return (static_cast<uint32_t>(completed) & 1) != phase; }
};

struct StageSet {
  std::vector<Barrier> full, empty;
  std::vector<int> holds;  // the chunk, counted over all items
  StageSet(int n, int producers, int consumers)
      : full(n, Barrier(producers)), empty(n, Barrier(consumers)), holds(n, kNothing) {}
};

// A warpgroup is a list of steps; a step returns false while it has to wait.
struct Role {
  std::vector<std::function<bool()>> steps;
  size_t at = 0;
  bool ended() const { return at == steps.size(); }
  bool run() { return steps[at]() ? (++at, true) : false; }
};

// A piece of work: its chunks, the first of which are silent; or the steps of a join. Of half a head the second math
// warpgroup has nothing; of factors it has M, which leaves through the last stage. A ragged chunk of a backward comes
// first.
struct Item {
  int chunks, warmup_tokens;
  bool joins, half, factors, ragged;
};

struct Model {
  StageSet loads, values, scores, works, x, r;
  std::vector<Barrier> operands_full, operands_empty;
  struct Copy {
    StageSet* slots;
    int stage, chunk;
  };
  std::vector<Copy> copies;  // asked for, under way in any order
  std::vector<Role> roles;
  static constexpr int kMathWarpgroups = 2, kLoaders = 2;  // of the scores, those who load K and Q, and V
  const Pass pass;

  Model(const std::vector<Item>& items, Pass what)
      : loads(kLoadStages, 1, 1 + kLoaders + kMathWarpgroups),
        values(kValueStages, 1, kMathWarpgroups),
        scores(kScoreStages, 1, kLoaders),
        works(kWorkStages, 1, 1 + kLoaders + kMathWarpgroups),
        x(kOperandStages, 1, 1),
        r(kOperandStages, 1, 1),
        operands_full(kOperandStages, Barrier(1 + kLoaders)),
        operands_empty(kOperandStages, Barrier(kMathWarpgroups)),
        pass(what) {
    roles.push_back(keys_role(items));
    for (int loader = 0; loader < kLoaders; ++loader) roles.push_back(scores_role(items, loader == 0));
    for (int m = 0; m < kMathWarpgroups; ++m)
      roles.push_back(pass == Pass::kBackward ? gradient_role(items, m) : math_role(items, m));
  }

  // Whether there are scores and R of a chunk.
  bool has_scores(const Item& item, int c) const {
    return pass == Pass::kBackward || (pass == Pass::kForward && c >= item.warmup_tokens);
  }

  // Steps are recorded with the rings' positions at that point.
  static void wait(Role& role, const Barrier& barrier, uint32_t phase) {
    role.steps.push_back([&barrier, phase] { return barrier.passed(phase); });
  }
  static void act(Role& role, std::function<void()> action) {
    role.steps.push_back([action = std::move(action)] {
      action();
      return true;
    });
  }
  static void expect(Role& role, StageSet& slots, int stage, int chunk) {
    act(role, [&slots, stage, chunk] { EXPECT_EQ(slots.holds[stage], chunk); });
  }

  // Takes the next entry of the list of work, which the warp that loads has told of.
  void take_work(Role& role, WorkPipelineState& ring, int entry) {
    const PipelineState<kWorkStages> at = ring.at();
    wait(role, works.full[at.stage], at.phase);
    expect(role, works, at.stage, entry);
    act(role, [this, stage = at.stage] { works.empty[stage].arrive(); });
    ring.advance();
  }
  // Calls f with every chunk, its item and its number in it, between the entries of a role that reads the list.
  template <class F>
  void for_chunks(Role& role, const std::vector<Item>& items, const F& f) {
    WorkPipelineState ring;
    int chunk = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      take_work(role, ring, static_cast<int>(i));
      for (int c = 0; c < items[i].chunks; ++c) f(chunk++, items[i], c);
    }
    take_work(role, ring, kEndOfWork);
  }
  void pass_loads(Role& role, const PipelineState<kLoadStages>& load, int chunk) {
    wait(role, loads.full[load.stage], load.phase);
    expect(role, loads, load.stage, chunk);
    act(role, [this, stage = load.stage] { loads.empty[stage].arrive(); });
  }

  Role keys_role(const std::vector<Item>& items) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kScoreStages> score;
    PipelineState<kOperandStages> operand;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (item.joins) {
        pass_loads(role, load, chunk);
        return load.advance();
      }
      wait(role, loads.full[load.stage], load.phase);
      expect(role, loads, load.stage, chunk);
      if (has_scores(item, c)) {
        wait(role, scores.empty[score.stage], score.phase ^ 1);
        act(role, [this, stage = score.stage] { scores.holds[stage] = kNothing; });  // half written
        act(role, [this, stage = score.stage, chunk] {
          scores.holds[stage] = chunk;
          scores.full[stage].arrive();
        });
        score.advance();
      }
      build(role, x, load, operand, chunk);
      load.advance();
      operand.advance();
    });
    return role;
  }

  // One warp asks for K and Q, a chunk ahead or, in joins, two, and tells of the work it finds on the way; one for V.
  Role scores_role(const std::vector<Item>& items, bool loads_keys) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kScoreStages> score;
    PipelineState<kOperandStages> operand;
    WorkPipelineState field;
    std::vector<int> entry_of;  // by chunk, where one begins, else kNothing
    for (size_t i = 0; i < items.size(); ++i)
      for (int c = 0; c < items[i].chunks; ++c) entry_of.push_back(c == 0 ? static_cast<int>(i) : kNothing);
    const int chunks = static_cast<int>(entry_of.size());
    const auto find = [&](int chunk) {  // what the cursor does when it gets there
      if (chunk < chunks && entry_of[chunk] == kNothing) return;
      const PipelineState<kWorkStages> at = field.at();
      wait(role, works.empty[at.stage], at.phase ^ 1);
      act(role, [this, stage = at.stage, entry = chunk < chunks ? entry_of[chunk] : kEndOfWork] {
        works.holds[stage] = entry;
        works.full[stage].arrive();
      });
      field.advance();
    };
    const auto ask = [&](StageSet& slots, const auto& ring, int chunk) {
      wait(role, slots.empty[ring.stage], ring.phase ^ 1);
      act(role, [this, &slots, stage = ring.stage, chunk] { copies.push_back({&slots, stage, chunk}); });
    };
    int asked = 0;
    PipelineState<kLoadStages> next;
    if (loads_keys) find(0);
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      for (; loads_keys && asked < std::min(chunks, chunk + (item.joins ? 3 : 2)); ++asked, next.advance()) {
        ask(loads, next, asked);
        find(asked + 1);
      }
      if (!loads_keys) ask(values, load, chunk);
      if (item.joins) {
        pass_loads(role, load, chunk);
        return load.advance();
      }
      wait(role, loads.full[load.stage], load.phase);
      expect(role, loads, load.stage, chunk);
      if (has_scores(item, c)) {
        wait(role, scores.full[score.stage], score.phase);
        expect(role, scores, score.stage, chunk);
        act(role, [this, stage = score.stage] { scores.empty[stage].arrive(); });
        score.advance();
      }
      build(role, r, load, operand, chunk);
      load.advance();
      operand.advance();
    });
    return role;
  }

  void build(Role& role, StageSet& result, const PipelineState<kLoadStages>& load,
             const PipelineState<kOperandStages>& operand, int chunk) {
    expect(role, loads, load.stage, chunk);
    wait(role, operands_empty[operand.stage], operand.phase ^ 1);
    expect(role, loads, load.stage, chunk);
    act(role, [this, &result, load = load.stage, operand = operand.stage, chunk] {
      result.holds[operand] = chunk;
      operands_full[operand].arrive();
      loads.empty[load].arrive();
    });
  }

  // The stage something leaves through, and whose chunk's it is.
  struct Leaving {
    int stage = kNothing, chunk = kNothing;
  };
  void release(Role& role, Leaving& storing_stage) {
    if (storing_stage.stage == kNothing) return;
    expect(role, values, storing_stage.stage, storing_stage.chunk);
    act(role, [this, stage = storing_stage.stage] { values.empty[stage].arrive(); });
    storing_stage = {};
  }
  void leave(Role& role, Leaving& storing_stage, int stage, int chunk) {
    expect(role, values, stage, chunk);
    storing_stage = {stage, chunk};
  }
  void wait_values(Role& role, const PipelineState<kLoadStages>& load, int chunk) {
    wait(role, values.full[load.stage], load.phase);
    expect(role, values, load.stage, chunk);
  }
  void wait_operands(Role& role, const PipelineState<kOperandStages>& operand, int chunk) {
    wait(role, operands_full[operand.stage], operand.phase);
    expect(role, x, operand.stage, chunk);
    expect(role, r, operand.stage, chunk);
  }
  void release_operands(Role& role, PipelineState<kOperandStages>& operand, int chunk) {
    expect(role, x, operand.stage, chunk);
    act(role, [this, stage = operand.stage] { operands_empty[stage].arrive(); });
    operand.advance();
  }
  // A step of a join, or a chunk of which a warpgroup has no columns.
  bool passes(Role& role, const Item& item, int m, int chunk, PipelineState<kLoadStages>& load,
              PipelineState<kOperandStages>& operand, Leaving& storing_stage) {
    if (!item.joins && !(item.half && m == 1)) return false;
    pass_loads(role, load, chunk);
    release(role, storing_stage);
    wait_values(role, load, chunk);
    act(role, [this, stage = load.stage] { values.empty[stage].arrive(); });
    if (!item.joins) {
      wait_operands(role, operand, chunk);
      release_operands(role, operand, chunk);
    }
    load.advance();
    return true;
  }

  Role math_role(const std::vector<Item>& items, int m) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kOperandStages> operand;
    Leaving storing_stage;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (passes(role, item, m, chunk, load, operand, storing_stage)) return;
      const bool has_output = pass == Pass::kForward && c >= item.warmup_tokens, is_identity = item.factors && m == 1;
      wait(role, loads.full[load.stage], load.phase);
      expect(role, loads, load.stage, chunk);
      release(role, storing_stage);
      wait_values(role, load, chunk);
      if (is_identity) {
        leave(role, storing_stage, load.stage, chunk);
      } else if (!has_output) {
        act(role, [this, stage = load.stage] { values.empty[stage].arrive(); });
      }
      wait_operands(role, operand, chunk);
      expect(role, loads, load.stage, chunk);
      act(role, [this, stage = load.stage] { loads.empty[stage].arrive(); });
      if (has_output && c > item.warmup_tokens)
        leave(role, storing_stage, load.previous_stage(), chunk - 1);  // o, where its v came in
      release_operands(role, operand, chunk);
      load.advance();
      if (c < item.chunks - 1) return;
      if (has_output) {
        release(role, storing_stage);
        leave(role, storing_stage, load.previous_stage(), chunk);
      }
      if (is_identity) expect(role, values, load.previous_stage(), chunk);
    });
    return role;
  }

  Role gradient_role(const std::vector<Item>& items, int m) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kOperandStages> operand;
    Leaving storing_stage;
    bool has_before = false;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (passes(role, item, m, chunk, load, operand, storing_stage)) return;
      const bool is_warmup = c < item.warmup_tokens;
      if (c == 0) has_before = false;
      release(role, storing_stage);
      wait(role, loads.full[load.stage], load.phase);
      expect(role, loads, load.stage, chunk);
      wait_values(role, load, chunk);
      wait_operands(role, operand, chunk);
      if (has_before) leave(role, storing_stage, load.previous_stage(), chunk - 1);
      release_operands(role, operand, chunk);
      if (is_warmup) leave(role, storing_stage, load.stage, chunk);
      expect(role, values, load.stage, chunk);
      expect(role, loads, load.stage, chunk);
      act(role, [this, stage = load.stage] { loads.empty[stage].arrive(); });
      load.advance();
      has_before = !is_warmup && !(item.ragged && c == 0);
      if (!is_warmup && (!has_before || c == item.chunks - 1)) {
        release(role, storing_stage);
        leave(role, storing_stage, load.previous_stage(), chunk);
      }
      if (c == item.chunks - 1 && item.factors) expect(role, values, load.previous_stage(), chunk);
    });
    return role;
  }

  // True if every role came to its end.
  bool run(std::mt19937& random) {
    for (int idle = 0; idle < 2000; ++idle) {
      bool ended = true;
      for (const Role& role : roles) ended = ended && role.ended();
      if (ended) return true;
      if (!copies.empty() && random() % 3 == 0) {
        const size_t i = random() % copies.size();
        const Copy copy = copies[i];
        copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
        copy.slots->holds[copy.stage] = copy.chunk;
        copy.slots->full[copy.stage].arrive();
        idle = 0;
      }
      Role& role = roles[random() % roles.size()];
      if (!role.ended() && role.run()) idle = 0;
    }
    return false;
  }
};

void run_in_random_order(Pass pass) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Item> items(1 + random() % 7);
    for (Item& item : items) {
      item = {};
      item.chunks = 1 + static_cast<int>(random() % 7);
      item.joins = random() % 4 == 0;
      item.factors = !item.joins && random() % 4 == 0;
      item.half = !item.joins && !item.factors && random() % 3 == 0;
      item.ragged = random() % 3 == 0;
      item.warmup_tokens = random() % 3 ? 0 : static_cast<int>(random() % item.chunks);
      if (item.joins || item.factors) item.warmup_tokens = item.chunks;
    }
    Model model(items, pass);
    ASSERT_TRUE(model.run(random)) << "a deadlock in trial " << trial;
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Schedule, EndsAndNeverMixesChunks) { run_in_random_order(Pass::kForward); }
TEST(Schedule, OfStatesEndsAndNeverMixesChunks) { run_in_random_order(Pass::kStates); }
TEST(Schedule, OfGradientsEndsAndNeverMixesChunks) { run_in_random_order(Pass::kBackward); }

}  // namespace
}  // namespace gatedelta::cuda
