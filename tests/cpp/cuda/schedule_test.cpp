// A model of how the main kernel's warpgroups hand slots to each other (src/cuda/forward/kernel.cuh): rings, barriers
// and who arrives where, with everything else left out. Run in random order it must end, and nobody may ever see a slot
// that holds another chunk than the one expected.
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <vector>

#include "cuda/forward/layout.hpp"

namespace gatedelta::cuda {
namespace {

constexpr int kNothing = -1;

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

struct Model {
  SlotSet loads, values, scores, x, r;
  std::vector<Barrier> operands_full, operands_empty;
  struct Copy {
    SlotSet* slots;
    int slot, chunk;
  };
  std::vector<Copy> copies;  // asked for, under way in any order
  std::vector<Role> roles;

  Model(const std::vector<int>& items, int math)
      : loads(kLoadSlots, 1, 2 + math),
        values(kValueSlots, 1, math),
        scores(kScoreSlots, 1, 1),
        x(kOperandSlots, 1, 1),
        r(kOperandSlots, 1, 1),
        operands_full(kOperandSlots, Barrier(2)),
        operands_empty(kOperandSlots, Barrier(math)) {
    int chunks = 0;
    for (const int n : items) chunks += n;
    roles.push_back(keys_role(chunks));
    roles.push_back(scores_role(chunks));
    for (int m = 0; m < math; ++m) roles.push_back(math_role(items));
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

  Role keys_role(int chunks) {
    Role role;
    Ring<kLoadSlots> load;
    Ring<kScoreSlots> score;
    Ring<kOperandSlots> operand;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      wait(role, loads.full[load.slot], load.parity);
      expect(role, loads, load.slot, chunk);
      wait(role, scores.empty[score.slot], score.parity ^ 1);
      act(role, [this, slot = score.slot] { scores.holds[slot] = kNothing; });  // half written
      act(role, [this, slot = score.slot, chunk] {
        scores.holds[slot] = chunk;
        scores.full[slot].arrive();
      });
      build(role, x, load, operand, chunk);
      load.next();
      score.next();
      operand.next();
    }
    return role;
  }

  // Its first warp asks for the loads: K and Q one chunk ahead of V.
  Role scores_role(int chunks) {
    Role role;
    Ring<kLoadSlots> load, asked;
    Ring<kValueSlots> asked_values;
    Ring<kScoreSlots> score;
    Ring<kOperandSlots> operand;
    const auto ask = [&](SlotSet& slots, auto& ring, int chunk) {
      if (chunk >= chunks) return;
      wait(role, slots.empty[ring.slot], ring.parity ^ 1);
      act(role, [this, &slots, slot = ring.slot, chunk] { copies.push_back({&slots, slot, chunk}); });
      ring.next();
    };
    ask(loads, asked, 0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ask(loads, asked, chunk + 1);
      ask(values, asked_values, chunk);
      wait(role, scores.full[score.slot], score.parity);
      expect(role, scores, score.slot, chunk);
      wait(role, loads.full[load.slot], load.parity);
      expect(role, loads, load.slot, chunk);
      act(role, [this, slot = score.slot] { scores.empty[slot].arrive(); });
      build(role, r, load, operand, chunk);
      load.next();
      score.next();
      operand.next();
    }
    return role;
  }

  void build(Role& role, SlotSet& result, const Ring<kLoadSlots>& load, const Ring<kOperandSlots>& operand, int chunk) {
    expect(role, loads, load.slot, chunk);
    wait(role, operands_empty[operand.slot], operand.parity ^ 1);
    act(role, [&result, slot = operand.slot] { result.holds[slot] = kNothing; });  // half written
    expect(role, loads, load.slot, chunk);
    act(role, [this, &result, load = load.slot, operand = operand.slot, chunk] {
      result.holds[operand] = chunk;
      operands_full[operand].arrive();
      loads.empty[load].arrive();
    });
  }

  Role math_role(const std::vector<int>& items) {
    Role role;
    Ring<kLoadSlots> load;
    Ring<kOperandSlots> operand;
    int chunk = 0, leaving = kNothing;
    const auto release = [&](int of) {
      if (leaving == kNothing) return;
      expect(role, values, leaving, of);
      act(role, [this, slot = leaving] { values.empty[slot].arrive(); });
      leaving = kNothing;
    };
    for (const int count : items) {
      for (int c = 0; c < count; ++c, ++chunk) {
        wait(role, loads.full[load.slot], load.parity);
        expect(role, loads, load.slot, chunk);
        release(c == 0 ? chunk - 1 : chunk - 2);
        wait(role, values.full[load.slot], load.parity);
        expect(role, values, load.slot, chunk);
        wait(role, operands_full[operand.slot], operand.parity);
        expect(role, x, operand.slot, chunk);
        expect(role, loads, load.slot, chunk);
        act(role, [this, slot = load.slot] { loads.empty[slot].arrive(); });
        if (c > 0) {  // o leaves through the slot its v came in
          expect(role, values, load.previous(), chunk - 1);
          leaving = load.previous();
        }
        expect(role, x, operand.slot, chunk);
        expect(role, r, operand.slot, chunk);
        act(role, [this, slot = operand.slot] { operands_empty[slot].arrive(); });
        expect(role, values, load.slot, chunk);
        load.next();
        operand.next();
      }
      if (count == 0) continue;
      release(chunk - 2);
      expect(role, values, load.previous(), chunk - 1);
      leaving = load.previous();
    }
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

TEST(Schedule, EndsAndNeverMixesChunks) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<int> items(1 + random() % 7);
    for (int& chunks : items) chunks = static_cast<int>(random() % 7);
    Model model(items, 1 + static_cast<int>(random() % 2));
    ASSERT_TRUE(model.run(random)) << "a deadlock in trial " << trial;
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace gatedelta::cuda
