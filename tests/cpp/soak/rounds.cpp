#include "rounds.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <thread>

#include "testing/contents.hpp"

namespace gatedelta::soak {

namespace {

constexpr int64_t kHangMs = 60'000;
constexpr int64_t kOwnSlots = 8;  // of a process in the shared pool; between them as many that are no one's
constexpr int64_t kHeads = 2, kSize = 32;
constexpr size_t kSlotBytes = kHeads * kSize * kSize * sizeof(float);

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

}  // namespace

Rounds::Rounds(const Setting& setting)
    : setting_(setting),
      board_memory_(sizeof(Board)),
      pool_memory_(static_cast<size_t>((setting.processes + 1) * kOwnSlots) * kSlotBytes),
      board_(*new (board_memory_.data()) Board()),
      dice_{setting.seed + 3, 0} {}

uint64_t Rounds::kills(int signal) const { return signal == SIGKILL ? kills_ : terms_; }

uint64_t Rounds::all_runs() const {
  uint64_t runs = 0;
  for (const Count& count : board_.count) runs += count.runs;
  return runs;
}

void Rounds::start() {
  board_.turn = 0;
  board_.is_chaos = board_.is_over = false;
  for (auto& process : board_.places)
    for (Place& place : process) place.since = 0, place.in_call = false;
  std::memset(pool_memory_.data(), testing::kPoison, pool_memory_.size());
  OwnSlots slots;
  slots.pool.data = pool_memory_.data();
  slots.pool.dtype = GD_F32;
  slots.pool.rank = 4;
  const int64_t shape[] = {(setting_.processes + 1) * kOwnSlots, kHeads, kSize, kSize};
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    slots.pool.shape[axis] = shape[axis];
    slots.pool.stride[axis] = stride;
    stride *= shape[axis];
  }
  for (int process = 0; process < setting_.processes; ++process) {
    slots.slots.clear();
    for (int64_t i = 0; i < kOwnSlots; ++i) slots.slots.push_back(i * (setting_.processes + 1) + process);
    std::fflush(stdout);
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) _exit(work(setting_, board_, round_, process, slots));
    processes_.push_back(pid);
  }
}

// The slots that no process owns are as they were.
bool Rounds::is_spare_intact() const {
  const char* const pool = static_cast<const char*>(pool_memory_.data());
  for (int64_t i = 0; i < kOwnSlots; ++i) {
    const char* const slot = pool + static_cast<size_t>(i * (setting_.processes + 1) + setting_.processes) * kSlotBytes;
    if (!std::all_of(slot, slot + kSlotBytes, [](char byte) { return byte == testing::kPoison; })) return false;
  }
  return true;
}

bool Rounds::hang(const char* what) {
  board_.fail(std::string("HANG: ") + what);
  for (const pid_t pid : processes_)
    if (pid) kill(pid, SIGKILL);
  for (const pid_t pid : processes_)
    if (pid) waitpid(pid, nullptr, 0);
  processes_.clear();
  return false;
}

// Processes that have ended. Before the end of a round that is a failure.
void Rounds::reap() {
  for (size_t i = 0; i < processes_.size(); ++i) {
    int status = 0;
    if (!processes_[i] || waitpid(processes_[i], &status, WNOHANG) != processes_[i]) continue;
    processes_[i] = 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    board_.is_over = true;
    if (!WIFSIGNALED(status)) continue;  // it has said why
    std::string what = "a process ended by signal " + std::to_string(WTERMSIG(status)) + ", in the middle of";
    for (Place& place : board_.places[i])
      if (place.since.exchange(0)) what += std::string("\n  ") + place.what;
    board_.fail(what);
  }
}

bool Rounds::keep_watch() {
  reap();
  const int64_t now = now_ms();
  for (const auto& process : board_.places)
    for (const Place& place : process) {
      const int64_t since = place.since;
      if (since && now - since > kHangMs) return hang(place.what);
    }
  pause();
  return true;
}

// A process that is in the middle of a call, if one is within a moment.
void Rounds::kill_one(int signal) {
  std::vector<int> alive;
  for (int i = 0; i < std::ssize(processes_); ++i)
    if (processes_[static_cast<size_t>(i)]) alive.push_back(i);
  if (alive.size() < 2) return;
  const int victim = alive[static_cast<size_t>(dice_.below(std::ssize(alive)))];
  auto& places = board_.places[victim];
  const auto in_call = [&] {
    return std::any_of(places, places + 2 * kMostThreads, [](auto& p) { return p.in_call.load(); });
  };
  for (int64_t begin = now_ms(); !in_call() && now_ms() - begin < 200;) std::this_thread::yield();
  pid_t& pid = processes_[static_cast<size_t>(victim)];
  kill(pid, signal);
  waitpid(pid, nullptr, 0);
  pid = 0;
  ++(signal == SIGKILL ? kills_ : terms_);
  kills_in_calls_ += in_call();
  for (Place& place : places) place.since = 0, place.in_call = false;
}

bool Rounds::end() {
  board_.is_over = true;
  const auto ended = [](pid_t pid) { return pid == 0; };
  for (const int64_t begin = now_ms(); !std::all_of(processes_.begin(), processes_.end(), ended);) {
    if (!keep_watch()) return false;
    if (now_ms() - begin > 2 * kHangMs) return hang("a process does not end");
  }
  processes_.clear();
  if (!is_spare_intact()) board_.fail("the shared pool was written in a slot that is no one's");
  return board_.failures == 0;
}

bool Rounds::run(double seconds) {
  start();
  while (board_.turn < setting_.processes && !board_.is_over)
    if (!keep_watch()) return false;
  board_.is_chaos = true;
  const int64_t begin = now_ms(), length = static_cast<int64_t>(1000 * seconds);
  // One kill in the first half, one in the second, each with its signal.
  const int64_t first = length * (10 + dice_.below(30)) / 100, second = length * (50 + dice_.below(30)) / 100;
  uint64_t runs_at_kill = 0;
  int killed = 0;
  while (now_ms() - begin < length && !board_.is_over) {
    if (!keep_watch()) return false;
    const int64_t passed = now_ms() - begin;
    if (killed < 2 && passed > (killed == 0 ? first : second)) {
      kill_one((round_ + static_cast<uint64_t>(killed)) % 2 ? SIGTERM : SIGKILL);
      if (++killed == 1) runs_at_kill = all_runs();
    }
  }
  ++round_;
  const bool ok = end();
  if (killed) runs_after_kills_ += all_runs() - runs_at_kill;
  return ok;
}

}  // namespace gatedelta::soak
