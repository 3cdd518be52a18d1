// A process of a round: draws its calls, runs each alone, and then all of them from several threads, with forks
// between.
#pragma once

#include "board.hpp"
#include "draw.hpp"

namespace gatedelta::soak {

struct Setting {
  Target target;
  uint64_t seed = 1;
  int processes = 4, threads = 3, calls = 36;
  bool plants = false;
};

// Of process `process` in round `round`. Returns the exit status.
int work(const Setting& setting, Board& board, uint64_t round, int process, const OwnSlots& slots);

}  // namespace gatedelta::soak
