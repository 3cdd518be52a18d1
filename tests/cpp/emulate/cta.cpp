#include "cta.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace gatedelta::testing::emulated {

namespace {

constexpr size_t kStackBytes = 128 << 10;

// ---- fibers ---------------------------------------------------------------------------------------------------------

#if defined(__x86_64__) || defined(__aarch64__)

// swapcontext() without its system calls: it would be most of the time of a test.
extern "C" void gd_switch_stacks(void** from, void* to);

#if defined(__x86_64__)
constexpr int kSavedWords = 8;  // six registers, where to return to, and a word for the alignment
constexpr int kReturnWord = 6;
asm(R"(
  .text
  .globl gd_switch_stacks
  .type gd_switch_stacks, @function
gd_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size gd_switch_stacks, . - gd_switch_stacks
)");
#else
constexpr int kSavedWords = 20;  // x19 to x30, d8 to d15
constexpr int kReturnWord = 11;  // x30
asm(R"(
  .text
  .globl gd_switch_stacks
  .type gd_switch_stacks, %function
gd_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size gd_switch_stacks, . - gd_switch_stacks
)");
#endif

struct Context {
  void* stack = nullptr;
};
// The stack as gd_switch_stacks() leaves it: registers, and entry() in the place of the return address.
void make_context(Context& context, char* stack, void (*entry)()) {
  void** const top = reinterpret_cast<void**>(stack + kStackBytes) - kSavedWords;  // a multiple of 16 bytes
  std::fill_n(top, kSavedWords, nullptr);
  top[kReturnWord] = reinterpret_cast<void*>(entry);
  context.stack = top;
}
void switch_context(Context& from, Context& to) { gd_switch_stacks(&from.stack, to.stack); }

#else

struct Context {
  ucontext_t context;
};
void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = kStackBytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}
void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

#endif

struct Meeting {
  int come = 0;
  uint64_t round = 0;
};

struct Cta {
  const std::function<void(int)>* body = nullptr;
  std::vector<uint8_t> smem;
  std::vector<Thread> threads;
  std::vector<Context> contexts;
  std::vector<Meeting> warps;
  Meeting all;
  Context scheduler;
  int current = 0;
  bool eager = false;
  uint64_t progress = 0;  // meetings that took place, and threads that are done
  std::string error;
};
Cta* cta = nullptr;

void leave() { switch_context(cta->contexts[cta->current], cta->scheduler); }

void enter() {
  (*cta->body)(cta->current);
  cta->threads[cta->current].done = true;
  ++cta->progress;
  for (;;) leave();
}

template <class Work>
void meet(Meeting& meeting, int size, const Work& work) {
  const uint64_t round = meeting.round;
  if (++meeting.come == size) {
    work();
    meeting.come = 0;
    ++meeting.round;
    ++cta->progress;
  } else {
    while (meeting.round == round) leave();
  }
}

}  // namespace

int current_thread() { return cta->current; }
Thread& thread(int number) { return cta->threads[number]; }
bool copies_are_eager() { return cta->eager; }

void fail(const std::string& what) {
  cta->error = "thread " + std::to_string(cta->current) + ": " + what;
  for (;;) leave();  // for good
}

uint8_t* shared_memory(uint32_t at, int bytes) {
  if (at % bytes) fail("misaligned access to shared memory");
  if (at + static_cast<size_t>(bytes) > cta->smem.size()) fail("access beyond shared memory");
  return cta->smem.data() + at;
}

void perform(const Copy& copy) {
  uint8_t* const to = shared_memory(copy.to, 16);
  if (copy.from) {
    std::memcpy(to, copy.from, 16);
  } else {
    std::memset(to, 0, 16);
  }
}

void meet_cta() {
  meet(cta->all, static_cast<int>(cta->threads.size()), [] {});
}

void meet_warp(void (*work)(int first)) {
  const int warp = cta->current / 32;
  meet(cta->warps[warp], 32, [&] { work(warp * 32); });
}

void run_cta(const Launch& launch, const std::function<void(int)>& body) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < static_cast<size_t>(launch.threads))
    stacks.emplace_back(new char[kStackBytes]);  // new aligns to 16
  Cta state;
  state.body = &body;
  state.smem.assign(launch.smem_bytes, 0xff);  // NaN as fp32, bf16 and fp16
  state.threads.resize(launch.threads);
  state.contexts.resize(launch.threads);
  state.warps.resize(launch.threads / 32);
  state.eager = launch.eager_copies;
  cta = &state;
  std::mt19937 lots(launch.seed);
  std::vector<int> order(launch.threads);
  for (int i = 0; i < launch.threads; ++i) {
    order[i] = i;
    make_context(state.contexts[i], stacks[i].get(), enter);
  }
  std::shuffle(order.begin(), order.end(), lots);

  const int warps = launch.threads / 32;
  int alone = -1, rounds = 0, idle = 0;  // alone: the warp that runs by itself; -1 = none
  uint64_t barriers = 0;
  for (bool any = true; any && state.error.empty();) {
    if (state.all.round != barriers) {  // then some have run on, and a warp that overtakes the others finds more
      barriers = state.all.round;
      if (lots() % 2) rounds = 0;
    }
    if (--rounds <= 0) {
      rounds = static_cast<int>(lots() % 500) + 1;
      alone = static_cast<int>(lots() % (warps + 1)) - 1;
      std::shuffle(order.begin(), order.end(), lots);
    }
    any = false;
    const uint64_t before = state.progress;
    for (const int i : order) {
      if (state.threads[i].done) continue;
      any = true;
      if (alone >= 0 && i / 32 != alone) continue;
      state.current = i;
      switch_context(state.scheduler, state.contexts[i]);
      if (!state.error.empty()) break;
    }
    if (state.progress != before) {
      idle = 0;
    } else {
      rounds = 0;  // the lone warp waits for others
      if (++idle > 50 * (warps + 1)) state.error = "some threads wait at a barrier for others that never come";
    }
  }
  cta = nullptr;
  if (!state.error.empty()) throw std::runtime_error(state.error);
}

}  // namespace gatedelta::testing::emulated
