// The backward's workspace: its regions, and the size documented in docs/api.md.
#include "cuda/sm90/workspace/backward.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda::sm90 {
namespace {

BackwardProblem dense(int64_t batch, int64_t tokens, int64_t heads) {
  BackwardProblem p;
  p.in.key_heads = p.in.value_heads = heads;
  p.in.group = 1;
  p.in.sequences.count = p.in.sequences.batch = batch;
  p.in.sequences.tokens = tokens;
  return p;
}
TokenRows given() { return {reinterpret_cast<void*>(64), GD_BF16, 0, 0, 0}; }

TEST(BackwardMemory, RegionsDoNotOverlap) {
  BackwardProblem p = dense(3, 200, 4);
  p.dA_log = {reinterpret_cast<void*>(64), GD_F32, 1};
  const BackwardWorkspace w = backward_layout(p);
  const size_t chunks = 3 * 4 * 4;  // four of 200 tokens
  EXPECT_GE(w.states, w.forward.bytes);
  EXPECT_EQ(w.gradients, w.states + chunks * kStateTileBytes);
  EXPECT_EQ(w.u, w.gradients + chunks * kStateTileBytes);
  EXPECT_GE(w.dv, w.u + size_t{3} * 200 * 4 * kHeadDim * 2);
  EXPECT_GE(w.head_sums, w.dv + size_t{3} * 200 * 4 * kHeadDim * 2);
  EXPECT_GE(w.grad_schedule, w.head_sums + chunks * 8);
  EXPECT_GE(w.grad_work, w.grad_schedule + sizeof(Schedule));
  EXPECT_GE(w.grad_boundary_ready, w.grad_work + size_t{2} * 12 * sizeof(WorkItem));
  EXPECT_GE(w.bytes, w.grad_boundaries + w.forward.boundary_count * size_t{kBoundaryBytes});
  for (const size_t at :
       {w.states, w.gradients, w.u, w.dv, w.head_sums, w.grad_schedule, w.grad_work, w.grad_boundaries})
    EXPECT_EQ(at % ForwardWorkspace::kAlign, 0u);
}

TEST(BackwardMemory, MatchesTheDocumentedSize) {
  for (const int64_t tokens : {4096, 32768}) {
    BackwardProblem p = dense(2, tokens, 16);
    p.context_parallel = false;
    const double heads = 2.0 * static_cast<double>(tokens) * 16;
    p.dv = given();
    const double with = static_cast<double>(backward_layout(p).bytes);
    EXPECT_NEAR(with / heads, 1388, 2);
    p.dv = {};
    EXPECT_NEAR((static_cast<double>(backward_layout(p).bytes) - with) / heads, 256, 0.1);
  }
}

// The states' list has room for an item per save interval of every head, also where nothing else is cut.
TEST(BackwardMemory, HasRoomForSaveIntervals) {
  for (const int64_t segment : {0, 256}) {
    for (const bool cuts : {false, true}) {
      BackwardProblem p = dense(1, 32768, 4);
      p.context_parallel = cuts;
      p.segment_chunks = cuts ? segment : 0;
      p.saved.present = true;
      EXPECT_GE(max_entries(forward_of(p)), 32768 / kSaveIntervalTokens * 4);
      EXPECT_LE(max_entries(forward_of(p)), kMaxPlannedEntries);
    }
  }
}

// Cutting takes at most twice the boundaries of a forward, and the lists.
TEST(BackwardMemory, OfBoundariesIsBounded) {
  for (const int64_t tokens : {4096, 32768, 524288}) {
    BackwardProblem p = dense(1, tokens, 4);
    const size_t with = backward_layout(p).bytes;
    p.context_parallel = false;
    EXPECT_LE(with - backward_layout(p).bytes, size_t{98} << 20);
  }
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
