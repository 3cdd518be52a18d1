// Runs independent items on the call's lanes. Which lane takes which item is left to chance; results never depend on
// it.
#pragma once

#include <atomic>

#include "cpu/backend.hpp"
#include "cpu/simd.hpp"

namespace gatedelta::cpu::GD_ISA {

// body(lane, item) for every item in [0, items). Session is set up once per lane (the AMX tile configuration).
template <class Session, class Body>
void for_each_item(const Context& context, int64_t items, const Body& body) {
  struct Task {
    std::atomic<int64_t> next;
    int64_t items;
    const Body* body;
    static void run(void* self, int64_t lane) {
      Task& task = *static_cast<Task*>(self);
      int64_t item = task.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= task.items) return;
      [[maybe_unused]] Session session;
      for (; item < task.items; item = task.next.fetch_add(1, std::memory_order_relaxed))
        (*task.body)(static_cast<int>(lane), item);
    }
  } task{{0}, items, &body};
  const int64_t lanes = items < context.lanes ? items : context.lanes;
  if (lanes > 1 && context.parallel_for) {
    context.parallel_for(context.parallel_for_context, lanes, &Task::run, &task);
  } else if (lanes > 0) {
    Task::run(&task, 0);
  }
}

}  // namespace gatedelta::cpu::GD_ISA
