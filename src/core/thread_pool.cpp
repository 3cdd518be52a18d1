#include "core/thread_pool.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace gatedelta {

namespace {

// Fields of the gate, from low to high: workers in the job, workers that may still join, the caller sleeps, the epoch.
constexpr uint64_t kJoined = 0xffff, kPermit = 1 << 16, kPermits = 0xffff * kPermit;
constexpr uint64_t kCallerSleeps = uint64_t{1} << 32, kEpoch = uint64_t{1} << 33;

// How long a thread watches for the next job (or for the end of one) before it sleeps: longer than the gaps between the
// phases of a call, short enough for an idle pool to cost nothing.
constexpr auto kSpin = std::chrono::microseconds(30);

// Set while a thread runs a task: jobs it starts run in place, so nested calls cannot deadlock.
constinit thread_local bool inside_task = false;

// Forks between the process that loaded the library and this one.
constinit std::atomic<uint64_t> forks{0};

uint64_t count_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static const int error = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  if (error) throw std::system_error(error, std::generic_category());
#endif
  return forks.load(std::memory_order_relaxed);
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` returns at once on most cores
#endif
}

// True as soon as done() is true; false if it is not within kSpin.
template <class Done>
bool spin_until(const Done& done) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause();
    }
    std::this_thread::yield();  // on a busy machine the other thread may need this CPU
  } while (Clock::now() < deadline);
  return done();
}

int allowed_cpus() {
#if defined(__linux__)
  // Machines with more than CPU_SETSIZE CPUs need a larger set than cpu_set_t.
  for (size_t cpus = CPU_SETSIZE; cpus <= (size_t{1} << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (!set) break;
    const int allowed =
        sched_getaffinity(0, CPU_ALLOC_SIZE(cpus), set) == 0 ? CPU_COUNT_S(CPU_ALLOC_SIZE(cpus), set) : 0;
    CPU_FREE(set);
    if (allowed > 0) return allowed;
  }
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

int cpu_count() {
  static const int count = std::clamp(allowed_cpus(), 1, kMaxThreads);
  return count;
}

WorkerPool::WorkerPool(int threads) : forks_(count_forks()) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {
    stop();
    throw;
  }
}

WorkerPool::~WorkerPool() { stop(); }

bool WorkerPool::is_inherited() const { return forks.load(std::memory_order_relaxed) != forks_; }

void WorkerPool::parallel_for(int64_t count, gd_task_fn run, void* task) {
  if (count <= 1 || workers_.empty() || inside_task || is_inherited()) {
    for (int64_t i = 0; i < count; ++i) run(task, i);
    return;
  }
  const std::lock_guard turn(turn_);
  run_ = run;
  task_ = task;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  open(std::min<int64_t>(count, size()) - 1);
  draw();
  close();
}

void WorkerPool::open(int64_t helpers) {
  int64_t wake;
  {
    // The lock keeps a worker from falling asleep between its last look at the gate and its wait.
    const std::lock_guard lock(mutex_);
    const uint64_t epoch = gate_.load(std::memory_order_relaxed) / kEpoch + 1;
    gate_.store(epoch * kEpoch + static_cast<uint64_t>(helpers) * kPermit, std::memory_order_release);
    wake = std::min(helpers, sleepers_);
  }
  for (; wake > 0; --wake) wake_.notify_one();
}

bool WorkerPool::join(uint64_t& seen) {
  uint64_t gate = gate_.load(std::memory_order_relaxed);
  while (gate & kPermits) {
    if (gate_.compare_exchange_weak(gate, gate - kPermit + 1, std::memory_order_acquire, std::memory_order_relaxed))
      break;
  }
  seen = gate / kEpoch;
  return gate & kPermits;
}

void WorkerPool::draw() {
  inside_task = true;
  for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) run_(task_, i);
  inside_task = false;
}

void WorkerPool::leave() {
  const uint64_t before = gate_.fetch_sub(1, std::memory_order_acq_rel);
  if ((before & kJoined) == 1 && (before & kCallerSleeps)) {
    const std::lock_guard lock(mutex_);
    done_.notify_one();
  }
}

// No index is left: closes the job to further workers and waits for those that have joined.
void WorkerPool::close() {
  const auto all_left = [this] { return (gate_.load(std::memory_order_acquire) & kJoined) == 0; };
  gate_.fetch_and(~kPermits, std::memory_order_acq_rel);
  if (spin_until(all_left)) return;
  std::unique_lock lock(mutex_);
  gate_.fetch_or(kCallerSleeps, std::memory_order_acq_rel);
  done_.wait(lock, all_left);
}

void WorkerPool::work() {
  uint64_t seen = 0;  // epoch of the last job looked at
  const auto called = [&] {
    return gate_.load(std::memory_order_relaxed) / kEpoch != seen || stopping_.load(std::memory_order_relaxed);
  };
  for (;;) {
    if (!spin_until(called)) {
      std::unique_lock lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, called);
      --sleepers_;
    }
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (join(seen)) {
      draw();
      leave();
    }
  }
}

void WorkerPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_relaxed);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

}  // namespace gatedelta
