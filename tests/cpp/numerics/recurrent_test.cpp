#include <sys/mman.h>

#include <cmath>

#include "cases.hpp"
#include "support.hpp"
#include "testing/number.hpp"

namespace gatedelta::testing {
namespace {

void check(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    Judge judge(parse_case(spec));
    for (const gd_isa isa : usable_isas()) {
      expect_ok(judge.recurrent({.isa = isa, .pool = nullptr, .threads = 0}), judge.problem().spec, "rec", isa);
    }
  }
}

TEST(Recurrent, Gates) { check(cross(gate_cases(), {"T=5"})); }
TEST(Recurrent, Betas) { check(cross(beta_cases(), {"T=4"})); }
TEST(Recurrent, Keys) { check(cross(key_cases(), {"T=8"})); }
TEST(Recurrent, Heads) { check(cross(head_cases(), {"B=3 T=1"})); }
TEST(Recurrent, Sizes) { check(cross(size_cases(), {"T=2"})); }
TEST(Recurrent, States) { check(state_cases()); }
TEST(Recurrent, Strides) { check(stride_cases()); }
TEST(Recurrent, ScaleAndOutputType) { check(scale_cases()); }
TEST(Recurrent, LongSequences) { check({"T=300 Hk=1 Hv=2 K=32 V=32 dtype=bf16", "T=300 Hk=1 Hv=2 K=32 V=32"}); }

// T = 1 decode over a pool, in place, as a serving engine calls it.
TEST(Recurrent, Decode) {
  check(cross(cross({"B=9 T=1 Hk=2 Hv=4 K=64 V=32 pool inplace l2norm gate=raw beta=logit"}, kDtypeSpecs),
              cross({"state=fp32", "state=bf16", "state=fp16"}, {"layout=kv", "layout=vk i64 strided"})));
}

// T = 2..8 drafts: which state is kept, and all of them.
TEST(Recurrent, DraftVerification) {
  Specs lengths;
  for (int T = 1; T <= 8; ++T) lengths.push_back("B=10 T=" + num(T) + " Hk=1 Hv=2 K=16 V=32 " + kDtypeSpecs[T % 3]);
  check(cross(lengths, cross({"accept", "accept pool inplace", "accept pool i64", "inplace"},
                             {"steps=none", "steps=dense", "steps=pool", "steps=pool layout=vk state=bf16 strided"})));
}

TEST(Recurrent, PackedDrafts) {
  check(cross({"lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 K=32 V=16"},
              {"accept", "accept pool", "accept pool inplace steps=pool", "steps=dense", "pool steps=dense strided i64",
               "h0=0", "ht=0", "dtype=bf16 state=bf16 accept"}));
}

// Verification that stores no state: of every five sequences two have no read slot and are padded rows.
TEST(Recurrent, PaddedRowsWithoutStoredStates) {
  check(cross({"B=10 T=4 Hk=1 Hv=2 K=32 V=16 pool ht=0", "lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 K=16 V=32 pool ht=0"},
              {"dtype=fp32", "dtype=bf16 i64 layout=vk state=bf16", "steps=dense", "steps=pool strided"}));
}

// Block tables of engines: some slots are nobody, columns and rows have strides, and the slot a draft starts from is
// the one of the last token kept of the draft before.
TEST(Recurrent, SlotsOfEngines) {
  check(cross(cross({"B=11 T=1 Hk=1 Hv=2 K=32 V=16 pool", "B=11 T=4 Hk=1 Hv=2 K=16 V=32 pool",
                     "lengths=3+0+1+8+2+5+4+1+7+2 pad=2 Hk=1 Hv=2 K=16 V=32 pool"},
                    {"first_slot=1", "first_slot=3 inplace accept strided", "picked=1", "picked=3 strided i64",
                     "picked=4 first_slot=1 inplace", "picked=2 ht=0"}),
              {"dtype=fp32", "dtype=bf16 state=bf16 layout=vk", "steps=pool strided"}));
  check(cross(
      {"lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 K=32 V=16 steps=rows", "lengths=6 pad=3 Hk=1 Hv=2 K=16 V=16 steps=rows"},
      {"pool=0", "pool ht=0", "pool first_slot=2 strided", "pool picked=4 first_slot=1 i64 ht=0",
       "pool inplace accept layout=vk state=fp16"}));
}

// A commit moves the states and nothing else.
TEST(Recurrent, CommitWithoutOutput) {
  for (const gd_isa isa : usable_isas()) {
    Judge judge(parse_case("B=7 T=4 Hk=1 Hv=2 K=32 V=32 dtype=bf16 accept pool inplace"));
    judge.problem().recurrent.o = {};
    expect_ok(judge.recurrent({.isa = isa, .pool = nullptr, .threads = 0}), judge.problem().spec, "rec", isa);
  }
}

// Slots beyond 2^31 elements: every product of slot and stride must be 64 bits wide. The memory is reserved, never
// filled: only the pages of the slots in use exist.
class HugePool : public ::testing::Test {
 protected:
  static constexpr int64_t kK = 128, kV = 128, kHeads = 2, kSlot = kHeads * kK * kV;
  static constexpr int64_t kSlots = (int64_t{5} << 30) / kSlot;  // 5 * 2^30 elements
  void SetUp() override {
    bytes_ = kSlots * kSlot * 4;
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) GTEST_SKIP() << "no address space for a pool of " << bytes_ << " bytes";
  }
  void TearDown() override {
    if (memory_ != MAP_FAILED) munmap(memory_, bytes_);
  }
  // `t` becomes the huge pool; sequence n's state (if it has one) is copied to its slot there.
  void move_to_pool(gd_tensor& t, const std::vector<int64_t>& slots) {
    const gd_tensor small = t;
    t.data = memory_;
    t.shape[0] = kSlots;
    if (small.data == nullptr) return;
    for (size_t n = 0; n < slots.size(); ++n) {
      const auto* from = static_cast<const float*>(small.data) + int64_t(n) * kSlot;
      std::copy(from, from + kSlot, static_cast<float*>(memory_) + slots[n] * kSlot);
    }
  }
  std::vector<double> slot(int64_t i) const {
    const float* data = static_cast<const float*>(memory_) + i * kSlot;
    return {data, data + kSlot};
  }

  // Three sequences in slots beyond 2^31 and 2^32 elements.
  const std::vector<int64_t> slots_ = {kSlots - 1, (int64_t{1} << 31) / kSlot + 3, (int64_t{1} << 32) / kSlot};
  const std::vector<int32_t> indices_ = {int32_t(slots_[0]), int32_t(slots_[1]), int32_t(slots_[2])};
  gd_tensor index_tensor() const {
    gd_tensor t{};
    t.data = const_cast<int32_t*>(indices_.data());
    t.dtype = GD_I32, t.rank = 1, t.shape[0] = 3, t.stride[0] = 1;
    return t;
  }
  void* memory_ = MAP_FAILED;
  size_t bytes_ = 0;
};

TEST_F(HugePool, EveryOperationFindsItsSlots) {
  const Case c = parse_case("B=3 T=5 Hk=1 Hv=2 K=128 V=128 inplace");
  for (const gd_isa isa : usable_isas()) {
    const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
    Problem p(c);
    const auto forward_truth = reference_forward(p.forward);
    const auto expect_final = [&](const char* what) {
      std::vector<double> got;
      for (const int64_t s : slots_) {
        const auto state = slot(s);
        got.insert(got.end(), state.begin(), state.end());
      }
      const auto result = compare(got, forward_truth.final_state, {3, 2, kK * kV}, {1e-5, 0});
      EXPECT_TRUE(result.ok) << what << " " << gd_isa_name(isa) << ": " << result.text();
    };
    gd_forward_args forward = p.forward;
    move_to_pool(forward.in.initial_state, slots_);
    forward.final_state = forward.in.initial_state;
    forward.in.initial_indices = forward.final_indices = index_tensor();
    ASSERT_EQ(run_forward(forward, exec), "");
    expect_final("forward");

    gd_recurrent_args recurrent = p.recurrent;
    move_to_pool(recurrent.in.initial_state, slots_);
    recurrent.final_state = recurrent.in.initial_state;
    recurrent.in.initial_indices = recurrent.final_indices = index_tensor();
    ASSERT_EQ(run_recurrent(recurrent, exec), "");
    expect_final("recurrent");

    gd_backward_args backward = p.backward;
    const auto backward_truth = reference_backward(backward);
    move_to_pool(backward.in.initial_state, slots_);
    backward.in.initial_indices = index_tensor();
    ASSERT_EQ(run_backward(backward, exec), "");
    for (const auto& [got, truth] : {std::pair(&backward.dg, &backward_truth.dg), {&backward.dk, &backward_truth.dk}}) {
      const auto result = compare(to_doubles(*got), *truth, head_shape(*got, 2), {1e-5, 0});
      EXPECT_TRUE(result.ok) << "backward " << gd_isa_name(isa) << ": " << result.text();
    }
  }
}

}  // namespace
}  // namespace gatedelta::testing
