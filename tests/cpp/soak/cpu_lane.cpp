#include "lane.hpp"

namespace gatedelta::soak {

namespace {

// A caller's own loop: tasks in another order than the library's pool gives them.
void backwards(void*, int64_t count, gd_task_fn run, void* task) {
  while (count > 0) run(task, --count);
}

class CpuLane final : public Lane {
 public:
  CpuLane(Board& board, Place& place, bool plants, gd_thread_pool* pool) : Lane(board, place, plants), pool_(pool) {}

  std::string run_alone(Call& call) override {
    const Busy busy(place_, call.text);
    call.reset();
    std::string error = run_steps(call, nullptr);
    call.keep(call.block());
    return error;
  }

  void run(std::span<Call* const> calls, Dice& dice) override {
    for (Call* call : calls) {
      const Busy busy(place_, call->text);
      call->reset();
      std::string error = run_steps(*call, &dice);
      note(*call, error.empty() ? check(*call, call->block(), dice) : error);
    }
  }

 private:
  void choose_threads(gd_exec& exec, Dice& dice) {
    switch (dice.below(pool_ ? 4 : 2)) {
      case 0: return;
      case 1: exec.parallel_for = backwards; break;
      default: exec.parallel_for = gd_thread_pool_parallel_for; exec.parallel_for_context = pool_;
    }
    exec.num_threads = static_cast<int32_t>(dice.below(6));
  }

  // dice: null in a serial run
  std::string run_steps(Call& call, Dice* dice) {
    for (const auto& step : call.steps) {
      gd_exec& exec = step->exec();
      exec.num_threads = 1;
      exec.parallel_for = nullptr;
      exec.parallel_for_context = nullptr;
      if (dice) choose_threads(exec, *dice);
      size_t bytes = 0;
      if (step->workspace(&bytes) != GD_OK) return std::string(step->name()) + "_workspace: " + gd_last_error();
      const testing::Buffer scratch(bytes);  // exactly as large as asked for, and NaN
      exec.workspace = scratch.data();
      exec.workspace_bytes = bytes;
      std::string error = run_step(*step);
      if (error.empty() && !scratch.guards_intact()) error = "wrote outside of its workspace";
      if (error.empty() && dice) error = refuse_some(call, *step, *dice);
      if (!error.empty()) return error;
    }
    return "";
  }

  gd_thread_pool* pool_;
};

}  // namespace

std::unique_ptr<Lane> make_cpu_lane(Board& board, Place& place, bool plants, gd_thread_pool* pool) {
  return std::make_unique<CpuLane>(board, place, plants, pool);
}

}  // namespace gatedelta::soak
