#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gatedelta/gatedelta.hpp"

#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace gatedelta::test {

struct Pool {
  explicit Pool(int threads) { check(gd_thread_pool_create(threads, &pool)); }
  ~Pool() { gd_thread_pool_destroy(pool); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  template <class Body>
  void run(int64_t count, Body body) const {
    gd_thread_pool_parallel_for(
        pool, count, [](void* task, int64_t i) { (*static_cast<Body*>(task))(i); }, &body);
  }

  gd_thread_pool* pool = nullptr;
};

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    const Pool pool(threads);
    EXPECT_EQ(gd_thread_pool_size(pool.pool), threads);
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<int> runs(static_cast<size_t>(count));  // no atomics: the pool orders tasks before the return
      pool.run(count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const int n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, ManyShortJobs) {
  const Pool pool(4);
  int64_t sum = 0;
  std::vector<int64_t> part(4);
  for (int64_t job = 0; job < 20000; ++job) {
    pool.run(4, [&](int64_t i) { part[static_cast<size_t>(i)] = job + i; });
    sum += std::accumulate(part.begin(), part.end(), int64_t{0});
  }
  EXPECT_EQ(sum, 4 * (20000LL * 19999 / 2) + 20000LL * 6);
}

TEST(ThreadPool, WakesSleepingWorkers) {
  const Pool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for them to fall asleep
    std::atomic<int> here{0};
    // Each task waits for the others, so all three threads must come.
    pool.run(3, [&](int64_t) {
      ++here;
      while (here.load() < 3) std::this_thread::yield();
    });
    EXPECT_EQ(here.load(), 3);
  }
}

TEST(ThreadPool, CallerSleepsThroughLongTasks) {
  const Pool pool(2);
  std::atomic<bool> started{false};
  std::atomic<int> done{0};
  pool.run(2, [&](int64_t) {
    if (!started.exchange(true)) {
      while (done.load() == 0) std::this_thread::yield();  // until the other thread has had its task
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ++done;
  });
  EXPECT_EQ(done.load(), 2);
}

TEST(ThreadPool, NestedCallsRunInPlace) {
  const Pool pool(3), other(2);
  std::atomic<int> inner{0};
  pool.run(8, [&](int64_t) {
    const auto thread = std::this_thread::get_id();
    pool.run(5, [&](int64_t) { inner += std::this_thread::get_id() == thread; });
    other.run(5, [&](int64_t) { inner += std::this_thread::get_id() == thread; });
  });
  EXPECT_EQ(inner.load(), 80);
}

TEST(ThreadPool, SeveralCallersQueue) {
  const Pool pool(3);
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(4);
  for (size_t caller = 0; caller < sums.size(); ++caller)
    callers.emplace_back([&, caller] {
      for (int job = 0; job < 500; ++job) {
        std::vector<int64_t> part(5);
        pool.run(5, [&](int64_t i) { part[static_cast<size_t>(i)] = i; });
        sums[caller] += std::accumulate(part.begin(), part.end(), int64_t{0});
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (const int64_t sum : sums) EXPECT_EQ(sum, 5000);
}

TEST(ThreadPool, IdlePoolUsesNoCpu) {
  const Pool pool(4);
  pool.run(4, [](int64_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::clock_t before = std::clock();  // of all threads of the process
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const double used = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(used, 0.02);
}

#if defined(__unix__)
// Another thread is in the middle of a job when the process forks, so the child finds the pool's locks taken.
TEST(ThreadPool, AForkedChildGoesOnAlone) {
  const Pool pool(3);
  std::atomic<bool> forked{false};
  std::thread busy([&] {
    pool.run(3, [&](int64_t) {
      while (!forked.load()) std::this_thread::yield();
    });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int64_t sum = 0;  // no atomics: one thread runs all of them
    for (int job = 0; job < 10; ++job) pool.run(5, [&](int64_t i) { sum += i; });
    gd_thread_pool_destroy(pool.pool);
    gd_thread_pool* own = nullptr;
    const bool made = gd_thread_pool_create(1, &own) == GD_OK;  // TSan takes no new thread after such a fork
    gd_thread_pool_destroy(own);
    _exit(made && sum == 100 ? 0 : 1);
  }
  forked = true;
  busy.join();
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

TEST(ThreadPool, DefaultIsOneThreadPerCpu) {
  const Pool pool(0);
  EXPECT_EQ(gd_thread_pool_size(pool.pool), info().cpu_count);
}

TEST(ThreadPool, RefusesBadArguments) {
  gd_thread_pool* pool = nullptr;
  EXPECT_EQ(gd_thread_pool_create(-1, &pool), GD_INVALID_ARGUMENT);
  EXPECT_STREQ(gd_last_error(), "num_threads is -1, must be from 0 to 1024");
  EXPECT_EQ(gd_thread_pool_create(1025, &pool), GD_INVALID_ARGUMENT);
  EXPECT_EQ(pool, nullptr);
  EXPECT_EQ(gd_thread_pool_create(1, nullptr), GD_INVALID_ARGUMENT);
  EXPECT_STREQ(gd_last_error(), "pool is null: there is nowhere to put the pool");
  gd_thread_pool_destroy(nullptr);
  EXPECT_EQ(gd_thread_pool_size(nullptr), 0);
}

}  // namespace gatedelta::test
