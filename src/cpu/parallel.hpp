// Runs independent items on the call's lanes. Results never depend on which lane takes which item.
#pragma once

#include <atomic>

#include "cpu/backend.hpp"
#include "cpu/simd.hpp"

namespace gatedelta::cpu::GD_ISA {

template <class Task>
void run_lanes(const Context& context, int64_t lanes, Task& task) {
  if (lanes > 1 && context.parallel_for) {
    context.parallel_for(context.parallel_for_context, lanes, &Task::run, &task);
  } else {
    for (int64_t lane = 0; lane < lanes; ++lane) Task::run(&task, lane);
  }
}

// body(lane, item) for every item in [0, items), whichever lane is free next. Session is set up once per lane (the AMX
// tile configuration).
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
  run_lanes(context, items < context.lanes ? items : context.lanes, task);
}

// The same with a fixed share for every lane: from call to call, an item's memory stays in one lane's cache.
template <class Body>
void for_each_share(const Context& context, int64_t items, const Body& body) {
  struct Task {
    int64_t items, lanes;
    const Body* body;
    static void run(void* self, int64_t lane) {
      const Task& task = *static_cast<Task*>(self);
      const int64_t end = task.items * (lane + 1) / task.lanes;
      for (int64_t item = task.items * lane / task.lanes; item < end; ++item)
        (*task.body)(static_cast<int>(lane), item);
    }
  } task{items, items < context.lanes ? items : context.lanes, &body};
  run_lanes(context, task.lanes, task);
}

}  // namespace gatedelta::cpu::GD_ISA
