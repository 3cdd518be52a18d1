// A pool of persistent workers behind gd_parallel_for_fn.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "gatedelta/gatedelta.h"

namespace gatedelta {

constexpr int kMaxThreads = 1024;

// CPUs this process may run on. Read once, so that a workspace query and the call after it agree.
int cpu_count();

// The caller opens a job by moving `gate_` to the next epoch. The caller and the workers that join an open job draw
// indices from one counter. The caller waits only for workers that have joined, never for one to wake up: a job costs
// little while workers sleep, and a late worker does not touch it.
class WorkerPool {
 public:
  explicit WorkerPool(int threads);  // the caller counts as one; throws std::system_error
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // True in a forked child of the process that made the pool: it has none of the workers, and the locks as they were at
  // the fork. parallel_for then runs in place, and the pool cannot be destroyed.
  bool is_inherited() const;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // As gd_parallel_for_fn. Callers take turns; a call from inside a task, of any pool, runs in place.
  void parallel_for(int64_t count, gd_task_fn run, void* task);

 private:
  void open(int64_t helpers);
  bool join(uint64_t& seen);
  void draw();
  void leave();
  void close();
  void work();
  void stop();

  // The job; written only while no worker is joined or can join.
  gd_task_fn run_ = nullptr;
  void* task_ = nullptr;
  int64_t count_ = 0;

  alignas(64) std::atomic<uint64_t> gate_{0};  // fields in thread_pool.cpp
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::mutex mutex_;  // of the two condition variables
  std::condition_variable wake_, done_;
  int64_t sleepers_ = 0;
  std::atomic<bool> stopping_{false};
  std::mutex turn_;  // held by the caller whose job it is
  std::vector<std::thread> workers_;
  const uint64_t forks_;  // those before the pool was made
};

}  // namespace gatedelta
