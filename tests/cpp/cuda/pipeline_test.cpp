// A model of how the warpgroups of the chain kernels hand pipeline stages to each other (src/cuda/sm90/chain, and for
// the other passes src/cuda/sm90/backward/states_chain.cuh and grad_chain.cuh). It has pipelines, barriers and their
// arrivals, and nothing else. In any random order of steps it must end, and no role may see a stage that holds another
// chunk than the expected one.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "cuda/sm90/chain/config.hpp"

namespace gatedelta::cuda::sm90 {
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

// A work item: chunks, the first of which are warm-up, or the steps of a merge. The second math warpgroup has no
// columns of half a head. Of a transition it has M, which it stores through the last stage. In the gradient chain a
// ragged chunk is the first.
struct Item {
  int chunks, warmup_chunks;
  bool is_merge, is_half, is_transition, is_ragged;
};

struct Model {
  StageSet loads, values, scores, works, x, r;
  std::vector<Barrier> operands_full, operands_empty;
  struct Load {
    StageSet* stages;
    int stage, chunk;
  };
  std::vector<Load> loads_in_flight;  // they complete in any order
  std::vector<Role> roles;
  static constexpr int kMathWarpgroups = 2, kLoaders = 2;  // of the scores warpgroup: one loads K and Q, the other V
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
    for (int math_wg = 0; math_wg < kMathWarpgroups; ++math_wg)
      roles.push_back(pass == Pass::kBackward ? gradient_role(items, math_wg) : math_role(items, math_wg));
  }

  // Whether a chunk has scores and R.
  bool has_scores(const Item& item, int c) const {
    return pass == Pass::kBackward || (pass == Pass::kForward && c >= item.warmup_chunks);
  }

  // A step is recorded with the pipelines' positions at that point.
  static void wait(Role& role, const Barrier& barrier, uint32_t phase) {
    role.steps.push_back([&barrier, phase] { return barrier.passed(phase); });
  }
  static void act(Role& role, std::function<void()> action) {
    role.steps.push_back([action = std::move(action)] {
      action();
      return true;
    });
  }
  static void expect(Role& role, StageSet& stages, int stage, int chunk) {
    act(role, [&stages, stage, chunk] { EXPECT_EQ(stages.holds[stage], chunk); });
  }

  // Takes the next entry of the work list, which the warp that loads K and Q has published.
  void get_next_work(Role& role, WorkPipelineState& work, int entry) {
    const PipelineState<kWorkStages> at = work.at();
    wait(role, works.full[at.stage], at.phase);
    expect(role, works, at.stage, entry);
    act(role, [this, stage = at.stage] { works.empty[stage].arrive(); });
    work.advance();
  }
  // Calls f(chunk, item, chunk number in the item) for every chunk of a role that reads the work list.
  template <class F>
  void for_chunks(Role& role, const std::vector<Item>& items, const F& f) {
    WorkPipelineState work;
    int chunk = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      get_next_work(role, work, static_cast<int>(i));
      for (int c = 0; c < items[i].chunks; ++c) f(chunk++, items[i], c);
    }
    get_next_work(role, work, kEndOfWork);
  }
  void skip_load(Role& role, const PipelineState<kLoadStages>& load, int chunk) {
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
      if (item.is_merge) {
        skip_load(role, load, chunk);
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

  // One warp loads K and Q one chunk ahead, or two in a merge, and publishes the work items it reaches. The other loads
  // V.
  Role scores_role(const std::vector<Item>& items, bool loads_keys) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kScoreStages> score;
    PipelineState<kOperandStages> operand;
    WorkPipelineState work;
    std::vector<int> entry_of;  // by chunk: the entry that begins there, or kNothing
    for (size_t i = 0; i < items.size(); ++i)
      for (int c = 0; c < items[i].chunks; ++c) entry_of.push_back(c == 0 ? static_cast<int>(i) : kNothing);
    const int chunks = static_cast<int>(entry_of.size());
    const auto publish_work = [&](int chunk) {  // as the cursor does when it reaches this chunk
      if (chunk < chunks && entry_of[chunk] == kNothing) return;
      const PipelineState<kWorkStages> at = work.at();
      wait(role, works.empty[at.stage], at.phase ^ 1);
      act(role, [this, stage = at.stage, entry = chunk < chunks ? entry_of[chunk] : kEndOfWork] {
        works.holds[stage] = entry;
        works.full[stage].arrive();
      });
      work.advance();
    };
    const auto issue = [&](StageSet& stages, const auto& pipe, int chunk) {
      wait(role, stages.empty[pipe.stage], pipe.phase ^ 1);
      act(role, [this, &stages, stage = pipe.stage, chunk] { loads_in_flight.push_back({&stages, stage, chunk}); });
    };
    int issued = 0;
    PipelineState<kLoadStages> next;
    if (loads_keys) publish_work(0);
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      for (; loads_keys && issued < std::min(chunks, chunk + (item.is_merge ? 3 : 2)); ++issued, next.advance()) {
        issue(loads, next, issued);
        publish_work(issued + 1);
      }
      if (!loads_keys) issue(values, load, chunk);
      if (item.is_merge) {
        skip_load(role, load, chunk);
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

  // The stage that a TMA store still reads, and its chunk.
  struct StoringStage {
    int stage = kNothing, chunk = kNothing;
  };
  void release(Role& role, StoringStage& storing_stage) {
    if (storing_stage.stage == kNothing) return;
    expect(role, values, storing_stage.stage, storing_stage.chunk);
    act(role, [this, stage = storing_stage.stage] { values.empty[stage].arrive(); });
    storing_stage = {};
  }
  void begin_store(Role& role, StoringStage& storing_stage, int stage, int chunk) {
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
  // Skips a step of a merge, or a chunk of which the warpgroup has no columns.
  bool skips(Role& role, const Item& item, int math_wg, int chunk, PipelineState<kLoadStages>& load,
             PipelineState<kOperandStages>& operand, StoringStage& storing_stage) {
    if (!item.is_merge && !(item.is_half && math_wg == 1)) return false;
    skip_load(role, load, chunk);
    release(role, storing_stage);
    wait_values(role, load, chunk);
    act(role, [this, stage = load.stage] { values.empty[stage].arrive(); });
    if (!item.is_merge) {
      wait_operands(role, operand, chunk);
      release_operands(role, operand, chunk);
    }
    load.advance();
    return true;
  }

  Role math_role(const std::vector<Item>& items, int math_wg) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kOperandStages> operand;
    StoringStage storing_stage;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (skips(role, item, math_wg, chunk, load, operand, storing_stage)) return;
      const bool has_output = pass == Pass::kForward && c >= item.warmup_chunks,
                 is_identity = item.is_transition && math_wg == 1;
      wait(role, loads.full[load.stage], load.phase);
      expect(role, loads, load.stage, chunk);
      release(role, storing_stage);
      wait_values(role, load, chunk);
      if (is_identity) {
        begin_store(role, storing_stage, load.stage, chunk);
      } else if (!has_output) {
        act(role, [this, stage = load.stage] { values.empty[stage].arrive(); });
      }
      wait_operands(role, operand, chunk);
      expect(role, loads, load.stage, chunk);
      act(role, [this, stage = load.stage] { loads.empty[stage].arrive(); });
      if (has_output && c > item.warmup_chunks)
        begin_store(role, storing_stage, load.previous_stage(), chunk - 1);  // O, through the stage that held its V
      release_operands(role, operand, chunk);
      load.advance();
      if (c < item.chunks - 1) return;
      if (has_output) {
        release(role, storing_stage);
        begin_store(role, storing_stage, load.previous_stage(), chunk);
      }
      if (is_identity) expect(role, values, load.previous_stage(), chunk);
    });
    return role;
  }

  Role gradient_role(const std::vector<Item>& items, int math_wg) {
    Role role;
    PipelineState<kLoadStages> load;
    PipelineState<kOperandStages> operand;
    StoringStage storing_stage;
    bool has_before = false;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (skips(role, item, math_wg, chunk, load, operand, storing_stage)) return;
      const bool is_warmup = c < item.warmup_chunks;
      if (c == 0) has_before = false;
      release(role, storing_stage);
      wait(role, loads.full[load.stage], load.phase);
      expect(role, loads, load.stage, chunk);
      wait_values(role, load, chunk);
      wait_operands(role, operand, chunk);
      if (has_before) begin_store(role, storing_stage, load.previous_stage(), chunk - 1);
      release_operands(role, operand, chunk);
      if (is_warmup) begin_store(role, storing_stage, load.stage, chunk);
      expect(role, values, load.stage, chunk);
      expect(role, loads, load.stage, chunk);
      act(role, [this, stage = load.stage] { loads.empty[stage].arrive(); });
      load.advance();
      has_before = !is_warmup && !(item.is_ragged && c == 0);
      if (!is_warmup && (!has_before || c == item.chunks - 1)) {
        release(role, storing_stage);
        begin_store(role, storing_stage, load.previous_stage(), chunk);
      }
      if (c == item.chunks - 1 && item.is_transition) expect(role, values, load.previous_stage(), chunk);
    });
    return role;
  }

  // True if every role ends.
  bool run(std::mt19937& random) {
    for (int idle = 0; idle < 2000; ++idle) {
      bool ended = true;
      for (const Role& role : roles) ended = ended && role.ended();
      if (ended) return true;
      if (!loads_in_flight.empty() && random() % 3 == 0) {
        const size_t i = random() % loads_in_flight.size();
        const Load load = loads_in_flight[i];
        loads_in_flight.erase(loads_in_flight.begin() + static_cast<std::ptrdiff_t>(i));
        load.stages->holds[load.stage] = load.chunk;
        load.stages->full[load.stage].arrive();
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
      item.is_merge = random() % 4 == 0;
      item.is_transition = !item.is_merge && random() % 4 == 0;
      item.is_half = !item.is_merge && !item.is_transition && random() % 3 == 0;
      item.is_ragged = random() % 3 == 0;
      item.warmup_chunks = random() % 3 ? 0 : static_cast<int>(random() % item.chunks);
      if (item.is_merge || item.is_transition) item.warmup_chunks = item.chunks;
    }
    Model model(items, pass);
    ASSERT_TRUE(model.run(random)) << "a deadlock in trial " << trial;
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Pipelines, EndsAndNeverMixesChunks) { run_in_random_order(Pass::kForward); }
TEST(Pipelines, OfStatesEndsAndNeverMixesChunks) { run_in_random_order(Pass::kStates); }
TEST(Pipelines, OfGradientsEndsAndNeverMixesChunks) { run_in_random_order(Pass::kBackward); }

}  // namespace
}  // namespace gatedelta::cuda::sm90
