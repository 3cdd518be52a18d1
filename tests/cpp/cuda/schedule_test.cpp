// A model of how the main kernel's warpgroups hand slots to each other (src/cuda/forward/kernel.cuh, and for the other
// passes src/cuda/backward/states.cuh and chain.cuh): rings, barriers and who arrives where, with everything else left
// out. Run in random order it must end, and nobody may ever see a slot
// that holds another chunk than the one expected.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "cuda/forward/schedule.hpp"

namespace gatedelta::cuda {
namespace {

constexpr int kNothing = -1, kNoMore = -2;

struct Barrier {
  int expected, pending, phase = 0;
  explicit Barrier(int count) : expected(count), pending(count) {}
  void arrive() {
    ASSERT_GT(pending, 0);
    if (--pending == 0) {
      ++phase;
      pending = expected;
    }
  }
  bool passed(uint32_t parity) const { return (static_cast<uint32_t>(phase) & 1) != parity; }
};

struct SlotSet {
  std::vector<Barrier> full, empty;
  std::vector<int> holds;  // the chunk, counted over all items
  SlotSet(int n, int producers, int consumers)
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
// warpgroup has nothing; of factors it has M, which leaves through the last slot. A ragged chunk of a backward comes
// first.
struct Item {
  int chunks, silent;
  bool joins, half, factors, ragged;
};

struct Model {
  SlotSet loads, values, scores, works, x, r;
  std::vector<Barrier> operands_full, operands_empty;
  struct Copy {
    SlotSet* slots;
    int slot, chunk;
  };
  std::vector<Copy> copies;  // asked for, under way in any order
  std::vector<Role> roles;
  static constexpr int kMath = 2, kLoaders = 2;  // of the scores, those who load K and Q, and V
  const Pass pass;

  Model(const std::vector<Item>& items, Pass what)
      : loads(kLoadSlots, 1, 1 + kLoaders + kMath),
        values(kValueSlots, 1, kMath),
        scores(kScoreSlots, 1, kLoaders),
        works(kWorkSlots, 1, 1 + kLoaders + kMath),
        x(kOperandSlots, 1, 1),
        r(kOperandSlots, 1, 1),
        operands_full(kOperandSlots, Barrier(1 + kLoaders)),
        operands_empty(kOperandSlots, Barrier(kMath)),
        pass(what) {
    roles.push_back(keys_role(items));
    for (int loader = 0; loader < kLoaders; ++loader) roles.push_back(scores_role(items, loader == 0));
    for (int m = 0; m < kMath; ++m)
      roles.push_back(pass == Pass::kBackward ? gradient_role(items, m) : math_role(items, m));
  }

  // Whether there are scores and R of a chunk.
  bool has_scores(const Item& item, int c) const {
    return pass == Pass::kBackward || (pass == Pass::kForward && c >= item.silent);
  }

  // Steps are recorded with the rings' positions at that point.
  static void wait(Role& role, const Barrier& barrier, uint32_t parity) {
    role.steps.push_back([&barrier, parity] { return barrier.passed(parity); });
  }
  static void act(Role& role, std::function<void()> action) {
    role.steps.push_back([action = std::move(action)] {
      action();
      return true;
    });
  }
  static void expect(Role& role, SlotSet& slots, int slot, int chunk) {
    act(role, [&slots, slot, chunk] { EXPECT_EQ(slots.holds[slot], chunk); });
  }

  // Takes the next entry of the list of work, which the warp that loads has told of.
  void take_work(Role& role, WorkRing& ring, int entry) {
    const Ring<kWorkSlots> at = ring.at();
    wait(role, works.full[at.slot], at.parity);
    expect(role, works, at.slot, entry);
    act(role, [this, slot = at.slot] { works.empty[slot].arrive(); });
    ring.next();
  }
  // Calls f with every chunk, its item and its number in it, between the entries of a role that reads the list.
  template <class F>
  void for_chunks(Role& role, const std::vector<Item>& items, const F& f) {
    WorkRing ring;
    int chunk = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      take_work(role, ring, static_cast<int>(i));
      for (int c = 0; c < items[i].chunks; ++c) f(chunk++, items[i], c);
    }
    take_work(role, ring, kNoMore);
  }
  void pass_loads(Role& role, const Ring<kLoadSlots>& load, int chunk) {
    wait(role, loads.full[load.slot], load.parity);
    expect(role, loads, load.slot, chunk);
    act(role, [this, slot = load.slot] { loads.empty[slot].arrive(); });
  }

  Role keys_role(const std::vector<Item>& items) {
    Role role;
    Ring<kLoadSlots> load;
    Ring<kScoreSlots> score;
    Ring<kOperandSlots> operand;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (item.joins) {
        pass_loads(role, load, chunk);
        return load.next();
      }
      wait(role, loads.full[load.slot], load.parity);
      expect(role, loads, load.slot, chunk);
      if (has_scores(item, c)) {
        wait(role, scores.empty[score.slot], score.parity ^ 1);
        act(role, [this, slot = score.slot] { scores.holds[slot] = kNothing; });  // half written
        act(role, [this, slot = score.slot, chunk] {
          scores.holds[slot] = chunk;
          scores.full[slot].arrive();
        });
        score.next();
      }
      build(role, x, load, operand, chunk);
      load.next();
      operand.next();
    });
    return role;
  }

  // One warp asks for K and Q, a chunk ahead or, in joins, two, and tells of the work it finds on the way; one for V.
  Role scores_role(const std::vector<Item>& items, bool loads_keys) {
    Role role;
    Ring<kLoadSlots> load;
    Ring<kScoreSlots> score;
    Ring<kOperandSlots> operand;
    WorkRing told;
    std::vector<int> entry_of;  // by chunk, where one begins, else kNothing
    for (size_t i = 0; i < items.size(); ++i)
      for (int c = 0; c < items[i].chunks; ++c) entry_of.push_back(c == 0 ? static_cast<int>(i) : kNothing);
    const int chunks = static_cast<int>(entry_of.size());
    const auto find = [&](int chunk) {  // what the cursor does when it gets there
      if (chunk < chunks && entry_of[chunk] == kNothing) return;
      const Ring<kWorkSlots> at = told.at();
      wait(role, works.empty[at.slot], at.parity ^ 1);
      act(role, [this, slot = at.slot, entry = chunk < chunks ? entry_of[chunk] : kNoMore] {
        works.holds[slot] = entry;
        works.full[slot].arrive();
      });
      told.next();
    };
    const auto ask = [&](SlotSet& slots, const auto& ring, int chunk) {
      wait(role, slots.empty[ring.slot], ring.parity ^ 1);
      act(role, [this, &slots, slot = ring.slot, chunk] { copies.push_back({&slots, slot, chunk}); });
    };
    int asked = 0;
    Ring<kLoadSlots> next;
    if (loads_keys) find(0);
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      for (; loads_keys && asked < std::min(chunks, chunk + (item.joins ? 3 : 2)); ++asked, next.next()) {
        ask(loads, next, asked);
        find(asked + 1);
      }
      if (!loads_keys) ask(values, load, chunk);
      if (item.joins) {
        pass_loads(role, load, chunk);
        return load.next();
      }
      wait(role, loads.full[load.slot], load.parity);
      expect(role, loads, load.slot, chunk);
      if (has_scores(item, c)) {
        wait(role, scores.full[score.slot], score.parity);
        expect(role, scores, score.slot, chunk);
        act(role, [this, slot = score.slot] { scores.empty[slot].arrive(); });
        score.next();
      }
      build(role, r, load, operand, chunk);
      load.next();
      operand.next();
    });
    return role;
  }

  void build(Role& role, SlotSet& result, const Ring<kLoadSlots>& load, const Ring<kOperandSlots>& operand, int chunk) {
    expect(role, loads, load.slot, chunk);
    wait(role, operands_empty[operand.slot], operand.parity ^ 1);
    expect(role, loads, load.slot, chunk);
    act(role, [this, &result, load = load.slot, operand = operand.slot, chunk] {
      result.holds[operand] = chunk;
      operands_full[operand].arrive();
      loads.empty[load].arrive();
    });
  }

  // The slot something leaves through, and whose chunk's it is.
  struct Leaving {
    int slot = kNothing, chunk = kNothing;
  };
  void release(Role& role, Leaving& leaving) {
    if (leaving.slot == kNothing) return;
    expect(role, values, leaving.slot, leaving.chunk);
    act(role, [this, slot = leaving.slot] { values.empty[slot].arrive(); });
    leaving = {};
  }
  void leave(Role& role, Leaving& leaving, int slot, int chunk) {
    expect(role, values, slot, chunk);
    leaving = {slot, chunk};
  }
  void wait_values(Role& role, const Ring<kLoadSlots>& load, int chunk) {
    wait(role, values.full[load.slot], load.parity);
    expect(role, values, load.slot, chunk);
  }
  void wait_operands(Role& role, const Ring<kOperandSlots>& operand, int chunk) {
    wait(role, operands_full[operand.slot], operand.parity);
    expect(role, x, operand.slot, chunk);
    expect(role, r, operand.slot, chunk);
  }
  void release_operands(Role& role, Ring<kOperandSlots>& operand, int chunk) {
    expect(role, x, operand.slot, chunk);
    act(role, [this, slot = operand.slot] { operands_empty[slot].arrive(); });
    operand.next();
  }
  // A step of a join, or a chunk of which a warpgroup has no columns.
  bool passes(Role& role, const Item& item, int m, int chunk, Ring<kLoadSlots>& load, Ring<kOperandSlots>& operand,
              Leaving& leaving) {
    if (!item.joins && !(item.half && m == 1)) return false;
    pass_loads(role, load, chunk);
    release(role, leaving);
    wait_values(role, load, chunk);
    act(role, [this, slot = load.slot] { values.empty[slot].arrive(); });
    if (!item.joins) {
      wait_operands(role, operand, chunk);
      release_operands(role, operand, chunk);
    }
    load.next();
    return true;
  }

  Role math_role(const std::vector<Item>& items, int m) {
    Role role;
    Ring<kLoadSlots> load;
    Ring<kOperandSlots> operand;
    Leaving leaving;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (passes(role, item, m, chunk, load, operand, leaving)) return;
      const bool has_output = pass == Pass::kForward && c >= item.silent, is_identity = item.factors && m == 1;
      wait(role, loads.full[load.slot], load.parity);
      expect(role, loads, load.slot, chunk);
      release(role, leaving);
      wait_values(role, load, chunk);
      if (is_identity) {
        leave(role, leaving, load.slot, chunk);
      } else if (!has_output) {
        act(role, [this, slot = load.slot] { values.empty[slot].arrive(); });
      }
      wait_operands(role, operand, chunk);
      expect(role, loads, load.slot, chunk);
      act(role, [this, slot = load.slot] { loads.empty[slot].arrive(); });
      if (has_output && c > item.silent) leave(role, leaving, load.previous(), chunk - 1);  // o, where its v came in
      release_operands(role, operand, chunk);
      load.next();
      if (c < item.chunks - 1) return;
      if (has_output) {
        release(role, leaving);
        leave(role, leaving, load.previous(), chunk);
      }
      if (is_identity) expect(role, values, load.previous(), chunk);
    });
    return role;
  }

  Role gradient_role(const std::vector<Item>& items, int m) {
    Role role;
    Ring<kLoadSlots> load;
    Ring<kOperandSlots> operand;
    Leaving leaving;
    bool has_before = false;
    for_chunks(role, items, [&](int chunk, const Item& item, int c) {
      if (passes(role, item, m, chunk, load, operand, leaving)) return;
      const bool is_silent = c < item.silent;
      if (c == 0) has_before = false;
      release(role, leaving);
      wait(role, loads.full[load.slot], load.parity);
      expect(role, loads, load.slot, chunk);
      wait_values(role, load, chunk);
      wait_operands(role, operand, chunk);
      if (has_before) leave(role, leaving, load.previous(), chunk - 1);
      release_operands(role, operand, chunk);
      if (is_silent) leave(role, leaving, load.slot, chunk);
      expect(role, values, load.slot, chunk);
      expect(role, loads, load.slot, chunk);
      act(role, [this, slot = load.slot] { loads.empty[slot].arrive(); });
      load.next();
      has_before = !is_silent && !(item.ragged && c == 0);
      if (!is_silent && (!has_before || c == item.chunks - 1)) {
        release(role, leaving);
        leave(role, leaving, load.previous(), chunk);
      }
      if (c == item.chunks - 1 && item.factors) expect(role, values, load.previous(), chunk);
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
        copy.slots->holds[copy.slot] = copy.chunk;
        copy.slots->full[copy.slot].arrive();
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
      item.silent = random() % 3 ? 0 : static_cast<int>(random() % item.chunks);
      if (item.joins || item.factors) item.silent = item.chunks;
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
