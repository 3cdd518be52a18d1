// A CTA on a CPU: every CUDA thread is a fiber, and an instruction that a warp executes together is a meeting of its 32
// fibers. Made to find mistakes, not for speed:
//   * which fiber runs next is drawn by lot, and now and then one warp alone runs on as far as it can, often after a
//     barrier: what no barrier orders comes in any order;
//   * cp.async copies either at once or as late as wait_group allows;
//   * shared memory is NaN at first, and addresses and alignments in it are checked;
//   * a barrier that not all threads reach fails.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gatedelta::testing::emulated {

struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
};

// Of one thread: what it brings to a meeting and takes from it, and its copies.
struct Thread {
  uint32_t slots[10];
  std::vector<Copy> open;                 // not committed
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  bool done = false;
};

struct Launch {
  int threads = 0, smem_bytes = 0;
  bool eager_copies = false;
  unsigned seed = 0;
};
// Runs body(thread) for all threads of a CTA. Throws std::runtime_error for what a GPU would not forgive.
void run_cta(const Launch& launch, const std::function<void(int)>& body);

// ---- for the instructions, inside of a CTA --------------------------------------------------------------------------

int current_thread();
Thread& thread(int number);
bool copies_are_eager();
uint8_t* shared_memory(uint32_t at, int bytes);  // checked; a multiple of `bytes`
void perform(const Copy& copy);
void meet_cta();
// work(first thread of the warp), once all 32 are there.
void meet_warp(void (*work)(int first));
[[noreturn]] void fail(const std::string& what);

}  // namespace gatedelta::testing::emulated
