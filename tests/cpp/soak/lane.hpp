// Where a thread of the soak runs calls: on the CPU, or on a CUDA stream of its own.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "board.hpp"
#include "call.hpp"

namespace gatedelta::soak {

class Lane {
 public:
  virtual ~Lane() = default;

  // The serial run of a call, whose bits all others must have. Nothing else runs meanwhile. "" or what went wrong.
  virtual std::string run_alone(Call& call) = 0;
  // Runs the calls, on a stream without a wait between them, and some refused ones beside them. What goes wrong is
  // noted on the board.
  virtual void run(std::span<Call* const> calls, Dice& dice) = 0;

 protected:
  Lane(Board& board, Place& place, bool plants) : board_(board), place_(place), plants_(plants) {}

  // Runs one step. "" or what went wrong.
  std::string run_step(Step& step) {
    place_.in_call = true;
    const gd_status status = step.run();
    place_.in_call = false;
    if (status == GD_OK) return "";
    return std::string(step.name()) + ": " + gd_status_name(status) + ": " + gd_last_error();
  }
  // After a step, with its workspace still there. A refused call writes nothing, so the bits stay those of the step.
  std::string refuse_some(Call& call, Step& step, Dice& dice) {
    if (!dice.one_in(4)) return "";
    ++board_.of(call).refusals;
    return step.refuse(dice);
  }
  // `got` is the call's block after a run.
  std::string check(Call& call, std::span<char> got, Dice& dice) {
    ++board_.of(call).runs;
    if (plants_ && dice.one_in(5)) got[static_cast<size_t>(dice.below(std::ssize(got)))] ^= 1;
    std::string difference = call.difference(got);
    if (!difference.empty()) ++board_.of(call).mismatches;
    return difference;
  }
  void note(const Call& call, const std::string& what) {
    if (!what.empty()) board_.fail(std::string(name_of(call.operation)) + " " + call.text + "\n  " + what);
  }

  Board& board_;
  Place& place_;

 private:
  bool plants_;  // changes a byte now and then, which must be found
};

// pool: what several lanes share; null: none
std::unique_ptr<Lane> make_cpu_lane(Board& board, Place& place, bool plants, gd_thread_pool* pool);
// most_bytes: of the blocks of the calls that one run() gets
std::unique_ptr<Lane> make_gpu_lane(Board& board, Place& place, bool plants, size_t most_bytes);

}  // namespace gatedelta::soak
