// What the processes of a soak share: what each thread is doing, counts, and what went wrong. It lies in memory that
// outlives them, so what a killed process was doing can still be read.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

#include "call.hpp"

namespace gatedelta::soak {

constexpr int kMostProcesses = 8, kMostThreads = 16;

inline int64_t now_ms() {  // the same clock in all processes
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A thread, or the forked child of one.
struct Place {
  std::atomic<int64_t> since;  // 0: nothing that could hang
  std::atomic<bool> in_call;
  char what[1000];
};

class Busy {
 public:
  Busy(Place& place, const std::string& what) : place_(place) {
    std::snprintf(place.what, sizeof place.what, "%s", what.c_str());
    place.since = now_ms();
  }
  ~Busy() { place_.since = 0; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Place& place_;
};

struct Count {
  std::atomic<uint64_t> calls, runs, refusals, mismatches;
};

struct Board {
  static constexpr uint64_t kMostFailures = 20;

  Count count[kOperations];
  std::atomic<uint64_t> judged, replays, forks, runs_in_children, runs_of_shared_pool, failures;
  char failure[kMostFailures][2000];
  // Of a round.
  std::atomic<int> turn;  // the process that makes its serial runs
  std::atomic<bool> is_chaos, is_over;
  Place places[kMostProcesses][2 * kMostThreads];  // the second half: children of the threads

  Count& of(const Call& call) { return count[static_cast<int>(call.operation)]; }
  void fail(const std::string& what) {
    const uint64_t i = failures++;
    if (i < kMostFailures) std::snprintf(failure[i], sizeof failure[i], "%s", what.c_str());
  }
};

// Zeros at first, inherited by forked processes.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("no shared memory");
  }
  ~SharedMemory() { munmap(data_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  void* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

}  // namespace gatedelta::soak
