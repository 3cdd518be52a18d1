// Work items: warp kLoadsKeysQueries takes them from the list and publishes them in the work pipeline; all warps read
// them there.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem, Pass kPass>
GD_DEVICE const WorkItem& Chain<Elem, kPass>::work_item(int stage) const {
  return static_cast<const WorkItem*>(__cvta_shared_to_generic(smem + Smem::kWork))[stage];
}

// Half of the value columns that a math warpgroup has in this item; negative: none.
template <class Elem, Pass kPass>
GD_DEVICE int Chain<Elem, kPass>::half_of(const Chunk& chunk, int math_wg) {
  return chunk.half == kWhole ? math_wg : math_wg == 0 ? chunk.half : -1;
}

// Chunks that need no Q, scores or R. The gradient chain always needs them.
template <class Elem, Pass kPass>
GD_DEVICE bool Chain<Elem, kPass>::is_state_only(const Chunk& chunk) {
  return kPass == Pass::kStates || (kPass == Pass::kForward && chunk.is_warmup());
}

// Leading tokens that need no Q, scores or R: warm-up chunks, or every step of a merge.
template <class Elem, Pass kPass>
GD_DEVICE int Chain<Elem, kPass>::state_only_tokens(const WorkItem& item) {
  if constexpr (kPass == Pass::kForward) return item.warmup_tokens;
  return kPass == Pass::kStates || item.kind == kMerge ? item.tokens : 0;
}

template <class Elem, Pass kPass>
GD_DEVICE int Chain<Elem, kPass>::get_next_work(WorkPipelineState& work) const {
  if (work.count > 0) warp_arrive(work_pipe.empty((work.count - 1) % kWorkStages));
  const PipelineState<kWorkStages> at = work.at();
  work_pipe.wait_full(at);
  work.advance();
  return uniform(work_item(at.stage).kind) == kNoWork ? kEndOfWork : at.stage;
}

// NOTE(ptxas): all lanes run this without a branch, which would keep the cursor out of uniform registers.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::publish_work(int word, WorkPipelineState& work) const {
  const PipelineState<kWorkStages> at = work.at();
  work_pipe.wait_empty(at);
  store_shared_if(lane < kWords, smem + Smem::kWork + at.stage * static_cast<int>(sizeof(WorkItem)) + lane * 4, word);
  barrier_arrive(work_pipe.full(at.stage));
  work.advance();
}

template <class Elem, Pass kPass>
GD_DEVICE int Chain<Elem, kPass>::next_tile(int tile, int half) {
  return tile == 0 ? 1 : tile == 1 ? 1 + half : kBoundaryTiles - tile;
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::get_initial_work(Loader& loader) const {
  loader.count = p.schedule->count;
  loader.static_items = p.schedule->static_items;
  if (loader.static_items > 0) {
    loader.ticket = static_cast<int>(blockIdx.x) - loader.static_items;
    loader.prefetch = kTicket;
  }
  fetch_work(loader);
}

// Publishes an item of one chunk whose stage counts as loaded.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::publish_dry_run(Loader& loader) const {
  int word = 0;
  const auto set = [&](size_t offset, int value) {
    word = lane == static_cast<int>(offset / sizeof(int)) ? value : word;
  };
  set(offsetof(WorkItem, kind), kDryRun);
  set(offsetof(WorkItem, half), kWhole);
  set(offsetof(WorkItem, tokens), kChunkTokens);
  set(offsetof(WorkItem, warmup_tokens), kReverse ? kChunkTokens : 0);  // a warm-up chunk stores no G
  set(offsetof(WorkItem, from), kFromZero);
  set(offsetof(WorkItem, to), kToNowhere);
  set(offsetof(WorkItem, origin), -1);  // no checkpoint after it
  publish_work(word, loader.cursor.work);
  barrier_arrive(load_pipe.full(0));
  loader.loads_in_flight = 1;
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::take_ticket(Loader& loader) const {
  loader.ticket = atomic_inc_if(&p.schedule->next_ticket, lane == 0);
  loader.prefetch = kTicket;
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::prefetch_entry(Loader& loader) const {
  const int i = loader.static_items + uniform(loader.ticket);
  loader.word = kNoWork;
  if (i < loader.count && lane < kWords) loader.word = reinterpret_cast<const int*>(p.work + i)[lane];
  loader.prefetch = kEntry;
}

// Moves the cursor to the next item that has a chunk; tokens_left <= 0 if there is none.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::fetch_work(Loader& loader) const {
  Cursor& cursor = loader.cursor;
  const auto field = [&](size_t offset) {
    return __shfl_sync(~0u, loader.word, static_cast<int>(offset / sizeof(int)));
  };
  bool ends;
  do {
    if (loader.prefetch == kNothing) take_ticket(loader);
    if (loader.prefetch == kTicket) prefetch_entry(loader);
    loader.prefetch = kNothing;
    ends = field(offsetof(WorkItem, kind)) == kNoWork;
    cursor.chunk = {field(offsetof(WorkItem, batch)),
                    field(offsetof(WorkItem, token)),
                    ends ? 0 : field(offsetof(WorkItem, tokens)),
                    field(offsetof(WorkItem, warmup_tokens)),
                    field(offsetof(WorkItem, head)),
                    field(offsetof(WorkItem, half))};
    cursor.key_head = field(offsetof(WorkItem, key_head));
    cursor.prepared = field(offsetof(WorkItem, prepared));
  } while (!ends && cursor.chunk.tokens_left <= 0);
  // NOTE: an item that waits for its state must not prefetch the next one: that one would be stuck behind it while
  // other CTAs are free. The load pipeline holds kLoadStages of its chunks, and the prefetch starts after those.
  const bool waits = field(offsetof(WorkItem, from)) >= 0 && field(offsetof(WorkItem, kind)) == kOutputs;
  loader.prefetch_tokens =
      waits ? min(3 * kChunkTokens, cursor.chunk.tokens_left - kLoadStages * kChunkTokens) : 3 * kChunkTokens;
  publish_work(loader.word, cursor.work);
  if constexpr (kPass == Pass::kForward)
    if (!ends && field(offsetof(WorkItem, from)) == kFromInitial)
      prefetch_state(field(offsetof(WorkItem, initial_slot)), cursor.chunk.head, cursor.chunk.half);
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::advance_loader(Loader& loader) const {
  Cursor& cursor = loader.cursor;
  if (loader.prefetch == kNothing) {
    if (cursor.chunk.tokens_left <= loader.prefetch_tokens) take_ticket(loader);
  } else if (loader.prefetch == kTicket) {
    prefetch_entry(loader);
  }
  cursor.chunk = cursor.chunk.next();
  cursor.prepared += is_merge(cursor.chunk) ? next_tile(cursor.prepared % kBoundaryTiles, cursor.key_head)
                     : kReverse             ? -p.value_heads
                                            : p.value_heads;
  if (cursor.chunk.tokens_left <= 0) fetch_work(loader);
}

}  // namespace gatedelta::cuda::sm90
