// Every layout of workspace and saved memory, for many random problems: each region is aligned, lies inside the
// caller's memory, and shares no byte with another region that is in use at the same time. The sizes are computed here
// a second time, from what the kernels read and write.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/sm90/workspace/backward.hpp"
#include "cuda/sm90/workspace/summary.hpp"

namespace gatedelta::cuda::sm90 {
namespace {

struct Region {
  std::string name;
  size_t begin;
  int64_t bytes;
};
using Regions = std::vector<Region>;

// `size` counts from the address to which the offsets refer.
void check(Regions regions, size_t align, size_t size) {
  std::erase_if(regions, [](const Region& r) { return r.bytes <= 0; });
  std::ranges::sort(regions, {}, &Region::begin);
  for (size_t i = 0; i < regions.size(); ++i) {
    const Region& r = regions[i];
    const size_t end = r.begin + static_cast<size_t>(r.bytes);
    EXPECT_EQ(r.begin % align, 0u) << r.name;
    EXPECT_LE(end, size) << r.name << " ends behind the memory";
    if (i + 1 == regions.size()) break;
    EXPECT_LE(end, regions[i + 1].begin) << r.name << " overlaps " << regions[i + 1].name;
  }
}
// Offsets count from the first 128-byte boundary of memory that is aligned to 64 bytes only.
void check_workspace(const Regions& regions, size_t bytes) {
  check(regions, ForwardWorkspace::kAlign, bytes - (ForwardWorkspace::kAlign - ForwardWorkspace::kCallersAlign));
}

struct RandomLayer {
  Layer in;
  std::vector<int64_t> lengths;

  int64_t chunks() const { return sequences_of(in.sequences).workspace_chunks(); }
  int64_t count() const { return in.sequences.count; }
  int64_t heads() const { return in.value_heads; }
  int64_t tokens() const { return in.sequences.batch * in.sequences.tokens; }
  bool is_planned() const { return sm90::is_planned(count(), heads()); }
};

struct Random {
  std::mt19937 bits{1};
  int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(bits() % (high - low + 1)); }
  bool one_in(int n) { return bits() % n == 0; }

  // Small and large, planned and not; some lengths are whole save intervals.
  RandomLayer layer() {
    RandomLayer layer;
    const int64_t heads = int64_t{1} << between(0, 6), longest = int64_t{1} << between(0, 14);
    const int64_t count = one_in(4) ? between(0, 200) : between(1, std::min<int64_t>(64, 1024 / heads));
    const bool is_packed = one_in(2);
    const int64_t unit = one_in(3) ? kSaveIntervalTokens : 1;
    const auto length = [&] { return between(0, longest) / unit * unit; };
    layer.lengths.assign(count, length());
    if (is_packed) std::ranges::generate(layer.lengths, length);
    layer.in.key_heads = layer.in.value_heads = heads;
    layer.in.group = 1;
    gatedelta::Sequences& s = layer.in.sequences;
    s.count = count;
    s.batch = is_packed ? 1 : count;
    s.tokens = is_packed   ? std::reduce(layer.lengths.begin(), layer.lengths.end()) + (one_in(2) ? between(0, 200) : 0)
               : count > 0 ? layer.lengths[0]
                           : 0;
    if (is_packed) s.offsets = {nullptr, false, true};  // as in a size query
    return layer;
  }
  template <class Problem>
  void options(Problem& p) {
    p.saved.present = one_in(2);
    p.context_parallel = !one_in(4);
    p.batch_invariant = one_in(6);
    p.segment_chunks = p.context_parallel && one_in(5) ? between(1, 40) : 0;
  }
};

// All of a forward except the boundaries. What is saved for a backward is not in the workspace.
Regions regions_of(const ForwardWorkspace& w, const ForwardProblem& p, const RandomLayer& layer, int prepared_bytes) {
  const int64_t chunk_heads = layer.chunks() * layer.heads();
  Regions regions;
  if (!p.saved) {
    regions = {
        {"prepared", w.prepared, chunk_heads * prepared_bytes},
        {"first_checkpoint", w.first_checkpoint, p.checkpoint_every || p.checkpoint_offsets ? layer.count() * 8 : 0},
        {"decays", w.decays, chunk_heads * 8},
        {"cuts", w.cuts, kShares * kCutBlocks * 8}};
  }
  regions.push_back({"schedule", w.schedule, sizeof(Schedule)});
  regions.push_back({"work", w.work, max_entries(p) * 64});
  regions.push_back({"initial_read", w.initial_read, layer.is_planned() ? layer.count() * layer.heads() * 4 : 0});
  regions.push_back({"boundary_ready", w.boundary_ready, w.boundary_count * int64_t{4}});
  return regions;
}
int64_t boundary_bytes(const ForwardWorkspace& w) { return w.boundary_count * int64_t{128} * 128 * (2 + 2 + 4); }

TEST(Layout, OfAForwardHasDisjointRegions) {
  Random random;
  int cut = 0;
  for (int round = 0; round < 10000; ++round) {
    const RandomLayer layer = random.layer();
    ForwardProblem p;
    p.in = layer.in;
    random.options(p);
    p.checkpoint_every = !p.saved && random.one_in(2) ? kChunkTokens : 0;
    p.checkpoint_offsets.present = !p.saved && !p.checkpoint_every && random.one_in(2);
    const ForwardWorkspace w = forward_layout(p);
    Regions regions = regions_of(w, p, layer, kPreparedBytes);
    regions.push_back({"boundaries", w.boundaries, boundary_bytes(w)});
    check_workspace(regions, w.bytes);
    EXPECT_GE(w.boundary_count, 0);
    cut += w.boundary_count > 0;
    if (HasFailure()) FAIL() << "in round " << round;
  }
  EXPECT_GT(cut, 2000);
}

TEST(Layout, OfSavedMemoryHasDisjointRegions) {
  Random random;
  for (int round = 0; round < 10000; ++round) {
    const RandomLayer layer = random.layer();
    const SavedLayout saved = saved_layout(layer.in);
    const int64_t chunk_heads = layer.chunks() * layer.heads();
    int64_t states = 0;  // after every whole save interval
    for (const int64_t length : layer.lengths) states += length / kSaveIntervalTokens;
    check({{"prepared", saved.prepared, chunk_heads * kBackwardPreparedBytes},
           {"decays", saved.decays, chunk_heads * 8},
           {"order", saved.order, layer.count() * 4},
           {"first_checkpoint", saved.first_checkpoint, layer.count() * 8},
           {"cuts", saved.cuts, kShares * kCutBlocks * 8},
           {"list", saved.list, int64_t{sizeof(SavedList)} + SavedList::kEntries * int64_t{sizeof(WorkItem)}},
           {"states", saved.states, states * layer.heads() * kHeadDim * kHeadDim * 4}},
          ForwardWorkspace::kCallersAlign, saved.bytes);
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

// The gradient chain runs first. Without slices the states kernel may run beside it, and everything is in use at the
// same time. With slices it starts after the gradient chain and may overwrite its boundaries, and nothing else.
TEST(Layout, OfABackwardHasDisjointRegions) {
  Random random;
  int sliced = 0, large_boundaries = 0;
  for (int round = 0; round < 20000; ++round) {
    const RandomLayer layer = random.layer();
    BackwardProblem p;
    p.in = layer.in;
    random.options(p);
    p.small_workspace = random.one_in(2);
    if (random.one_in(2)) p.dv = {nullptr, GD_BF16, 0, 0, 0};
    if (random.one_in(3)) p.dA_log = {nullptr, GD_F32, 1};
    if (random.one_in(3)) p.d_dt_bias = {nullptr, GD_F32, 1};
    const ForwardProblem forward = forward_of(p);
    const BackwardWorkspace w = backward_layout(p);
    const bool is_sliced = w.slices.count > 1;
    const int64_t chunk_heads = layer.chunks() * layer.heads(), row_bytes = layer.heads() * kHeadDim * 2;
    const bool wants_sums = p.dA_log || p.d_dt_bias;

    Regions always = regions_of(w.forward, forward, layer, kBackwardPreparedBytes);
    const int64_t work_bytes = max_entries(forward) * 64, tile_bytes = 128 * 128 * 2;
    for (const Region& r :
         Regions{{"gradients", w.gradients, chunk_heads * tile_bytes},
                 {"u", w.u, w.slices.tokens * row_bytes},
                 {"dv", w.dv, p.dv ? 0 : layer.tokens() * row_bytes},
                 {"head_sums", w.head_sums, wants_sums ? chunk_heads * 2 * 4 : 0},
                 {"slice1_schedule", w.slice1_schedule, is_sliced ? int64_t{sizeof(Schedule)} : 0},
                 {"slice1_work", w.slice1_work, is_sliced ? work_bytes : 0},
                 {"grad_schedule", w.grad_schedule, sizeof(Schedule)},
                 {"grad_work", w.grad_work, work_bytes},
                 {"grad_boundary_ready", w.grad_boundary_ready, w.forward.boundary_count * int64_t{4}}})
      always.push_back(r);
    // With saved states the states kernel needs no boundaries.
    always.push_back({"boundaries", w.forward.boundaries, p.saved ? 0 : boundary_bytes(w.forward)});
    const Region grad_boundaries{"grad_boundaries", w.grad_boundaries, boundary_bytes(w.forward)};
    const Region states{"states", w.states, w.slices.chunks * layer.heads() * tile_bytes};

    Regions first = always, second = always;
    first.push_back(grad_boundaries);
    second.push_back(states);
    if (!is_sliced) first.push_back(states);
    check_workspace(first, w.bytes);
    check_workspace(second, w.bytes);
    sliced += is_sliced;
    large_boundaries += is_sliced && grad_boundaries.bytes > states.bytes;
    if (HasFailure()) FAIL() << "in round " << round;
  }
  EXPECT_GT(sliced, 500);
  EXPECT_GT(large_boundaries, 20);
}

// A summary may be of some sequences of a pack: rows of the result are found for all of them.
template <class Problem>
void check_summaries(bool has_boundaries, int prepared_bytes) {
  Random random;
  int some = 0;
  for (int round = 0; round < 10000; ++round) {
    const RandomLayer layer = random.layer();
    Problem p;
    p.in = layer.in;
    p.saved.present = random.one_in(2);
    p.first = random.one_in(2) ? random.between(0, layer.count()) : 0;
    p.count = random.one_in(2) ? random.between(0, layer.count() - p.first) : layer.count() - p.first;
    const ForwardProblem forward = prepared_forward(p);
    const SummaryWorkspace w = summary_layout(p, has_boundaries, prepared_bytes);
    EXPECT_EQ(w.forward.boundary_count, 0);
    const int64_t pairs = p.count * layer.heads();
    Regions regions = regions_of(w.forward, forward, layer, prepared_bytes);
    for (const Region& r : Regions{{"schedule of the summary", w.schedule, int64_t{sizeof(Schedule)}},
                                   {"work of the summary", w.work, pairs * 2 * 64},
                                   {"faded", w.faded, pairs},
                                   {"rows", w.rows, layer.count() * 4},
                                   {"ready", w.ready, has_boundaries ? pairs * 4 : 0},
                                   {"M and S_loc", w.boundaries, has_boundaries ? pairs * 128 * 128 * (2 + 2 + 4) : 0}})
      regions.push_back(r);
    check_workspace(regions, w.bytes);
    some += p.count > 0 && p.count < layer.count();
    if (testing::Test::HasFailure()) FAIL() << "in round " << round;
  }
  EXPECT_GT(some, 2000);
}
TEST(Layout, OfASummaryHasDisjointRegions) { check_summaries<SummaryProblem>(true, kPreparedBytes); }
TEST(Layout, OfABackwardSummaryHasDisjointRegions) {
  check_summaries<BackwardSummaryProblem>(false, kBackwardPreparedBytes);
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
