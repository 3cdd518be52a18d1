#include "worker.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "lane.hpp"
#include "testing/judge.hpp"

namespace gatedelta::soak {

namespace {

constexpr int64_t kMostInFlight = 3;  // calls on a stream at a time

class Worker {
 public:
  Worker(const Setting& setting, Board& board, uint64_t round, int process)
      : setting_(setting), board_(board), process_(process), stream_(round * kMostProcesses + uint64_t(process)) {}

  // Makes the calls: of every operation as many as of any other, and one over the pool that processes share.
  void draw_calls(const OwnSlots& slots) {
    const Target host{.isas = testing::usable_isas()};
    for (int i = 0; i < setting_.calls; ++i) add(setting_.target.cuda ? setting_.target : host, i);
    // Where a GPU runs the calls, some run on the CPU beside it, and in forked children.
    for (int i = 0; setting_.target.cuda && i < kOperations; ++i) add(host, i);
    Dice dice{setting_.seed, stream_ * 1000 + 999};
    const Busy busy(place(0), "drawing the shared pool's steps");
    host_calls_.push_back(draw_decode_chain(dice, host, &slots));
    shared_ = host_calls_.back().get();
    ++board_.of(*shared_).calls;
  }

  bool run_alone() {
    size_t most_bytes = 0;
    for (const Made& call : device_calls_) most_bytes = std::max(most_bytes, call->block().size());
    lane_bytes_ = most_bytes * kMostInFlight;
    const std::unique_ptr<Lane> host = host_lane(0, nullptr);
    const std::unique_ptr<Lane> device = device_lane(0);
    Dice dice{setting_.seed, stream_ * 1000 + 998};
    bool ok = true;
    for (auto* calls : {&device_calls_, &host_calls_}) {
      Lane& lane = calls == &device_calls_ ? *device : *host;
      for (const Made& call : *calls) {
        std::string error = lane.run_alone(*call);
        if (error.empty() && call->judge && dice.one_in(kJudgeEvery)) {
          const Busy busy(place(0), "judging " + call->text);
          error = call->judge();
          ++board_.judged;
        }
        if (error.empty()) continue;
        board_.fail("alone: " + std::string(name_of(call->operation)) + " " + call->text + "\n  " + error);
        ok = false;
      }
    }
    return ok;
  }

  void run_threads() {
    gd_thread_pool* pool = nullptr;
    if (gd_thread_pool_create(4, &pool) != GD_OK) throw std::runtime_error(gd_last_error());
    std::vector<std::thread> threads;
    for (int i = 0; i < setting_.threads; ++i) {
      threads.emplace_back([this, i, pool] {
        try {
          run_thread(i, pool);
        } catch (const std::exception& e) {  // a device that is no longer usable
          board_.fail(e.what());
          board_.is_over = true;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    gd_thread_pool_destroy(pool);
  }

 private:
  static constexpr int kJudgeEvery = 8;

  Place& place(int thread) { return board_.places[process_][thread]; }
  std::unique_ptr<Lane> host_lane(int thread, gd_thread_pool* pool) {
    return make_cpu_lane(board_, place(thread), setting_.plants, pool);
  }
  std::unique_ptr<Lane> device_lane(int thread) {
#if GD_CUDA_COMPILED
    if (setting_.target.cuda) return make_gpu_lane(board_, place(thread), setting_.plants, lane_bytes_);
#endif
    return host_lane(thread, nullptr);
  }

  void add(const Target& target, int number) {
    const auto operation = static_cast<Operation>(number % kOperations);
    Dice dice{setting_.seed, stream_ * 1000 + uint64_t(number) + (target.cuda ? 500 : 0)};
    const Busy busy(place(0), std::string("drawing ") + name_of(operation));
    auto& calls = target.cuda ? device_calls_ : host_calls_;
    calls.push_back(draw(operation, dice, target));
    ++board_.of(*calls.back()).calls;
  }

  // Runs up to `most` of the calls that no other thread is running.
  void run_some(Lane& lane, const std::vector<Made>& calls, int64_t most, Dice& dice) {
    std::vector<Call*> chosen;
    const int64_t size = std::ssize(calls), begin = dice.below(size);
    for (int64_t i = 0; i < size && std::ssize(chosen) < most; ++i) {
      Call* const call = calls[static_cast<size_t>((begin + i) % size)].get();
      if (call->busy.try_lock()) chosen.push_back(call);
    }
    lane.run(chosen, dice);
    for (Call* call : chosen) {
      if (call == shared_) ++board_.runs_of_shared_pool;
      call->busy.unlock();
    }
  }

  void run_thread(int number, gd_thread_pool* pool) {
    Dice dice{setting_.seed + 1, stream_ * kMostThreads + uint64_t(number)};
    const std::unique_ptr<Lane> host = host_lane(number, pool);
    const std::unique_ptr<Lane> device = device_lane(number);
    pid_t child = 0;
    while (!board_.is_over && board_.failures < Board::kMostFailures) {
      if (!device_calls_.empty() && !dice.one_in(8)) {
        run_some(*device, device_calls_, 1 + dice.below(kMostInFlight), dice);
      } else {
        run_some(*host, host_calls_, 1, dice);
      }
      if (child && !is_running(child, WNOHANG)) child = 0;
      if (!child && dice.one_in(100)) child = fork_child(number, pool);
    }
    if (child) is_running(child, 0);
  }

  bool is_running(pid_t child, int options) {
    int status = 0;
    if (waitpid(child, &status, options) == 0) return true;
    if (WIFSIGNALED(status)) board_.fail("a forked child ended by signal " + std::to_string(WTERMSIG(status)));
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0) board_.fail("a forked child failed");
    return false;
  }

  // Parent and child both go on calling. Other threads may have been in the middle of a call, and have locked what they
  // used; in the child they are no more.
  pid_t fork_child(int thread, gd_thread_pool* pool) {
    const pid_t parent = getpid(), child = fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child > 0) {
      ++board_.forks;
      return child;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    Dice dice{setting_.seed + 2, board_.forks};
    try {
      gd_thread_pool* own = nullptr;
      if (gd_thread_pool_create(3, &own) != GD_OK) _exit(1);
      shared_->busy.try_lock();  // the child has a copy of everything but the shared pool, which stays its parent's
      for (gd_thread_pool* each : {pool, own, pool}) {
        const std::unique_ptr<Lane> lane = host_lane(kMostThreads + thread, each);
        for (int i = 0; i < 3; ++i, ++board_.runs_in_children) run_some(*lane, host_calls_, 1, dice);
      }
      gd_thread_pool_destroy(own);
      gd_thread_pool_destroy(pool);
    } catch (const std::exception& e) {
      board_.fail(std::string("in a forked child: ") + e.what());
      _exit(1);
    }
    _exit(0);  // without the parent's destructors
  }

  const Setting& setting_;
  Board& board_;
  int process_;
  uint64_t stream_;
  std::vector<Made> host_calls_, device_calls_;
  Call* shared_ = nullptr;
  size_t lane_bytes_ = 0;
};

template <class Done>
bool wait_for(const Board& board, const Done& done) {
  while (!done()) {
    if (board.is_over) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

int work(const Setting& setting, Board& board, uint64_t round, int process, const OwnSlots& slots) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    Worker worker(setting, board, round, process);
    worker.draw_calls(slots);
    if (!wait_for(board, [&] { return board.turn == process; })) return 0;
    if (!worker.run_alone()) return 1;
    ++board.turn;
    if (wait_for(board, [&] { return board.is_chaos.load(); })) worker.run_threads();
    return 0;
  } catch (const std::exception& e) {
    board.fail(e.what());
    return 1;
  }
}

}  // namespace gatedelta::soak
