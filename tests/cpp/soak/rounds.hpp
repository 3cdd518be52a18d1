// The parent of the soak's processes. It starts them round by round, kills some in the middle of calls, and ends
// everything at a hang. It never calls the library, so that what it forks begins with a clean state.
#pragma once

#include <sys/types.h>

#include <vector>

#include "worker.hpp"

namespace gatedelta::soak {

class Rounds {
 public:
  explicit Rounds(const Setting& setting);

  // One more round, with `seconds` of calls from everywhere. False: a hang, or something failed.
  bool run(double seconds);

  const Board& board() const { return board_; }
  uint64_t rounds() const { return round_; }
  uint64_t kills(int signal) const;
  uint64_t kills_in_calls() const { return kills_in_calls_; }
  uint64_t runs_after_kills() const { return runs_after_kills_; }

 private:
  void start();
  bool keep_watch();  // false: a hang
  void reap();
  void kill_one(int signal);
  bool end();
  bool is_spare_intact() const;
  uint64_t all_runs() const;
  [[nodiscard]] bool hang(const char* what);

  const Setting& setting_;
  SharedMemory board_memory_, pool_memory_;
  Board& board_;
  std::vector<pid_t> processes_;  // of this round; 0: ended
  Dice dice_;
  uint64_t round_ = 0, kills_ = 0, terms_ = 0, kills_in_calls_ = 0, runs_after_kills_ = 0;
};

}  // namespace gatedelta::soak
