#include <sys/mman.h>

#include "testing/number.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

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
  for (const gd_isa isa : engine_isas()) {
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
    forward.in.initial_state_indices = forward.final_state_indices = index_tensor();
    ASSERT_EQ(run(forward, isa), "");
    expect_final("forward");

    gd_recurrent_args recurrent = p.recurrent;
    move_to_pool(recurrent.in.initial_state, slots_);
    recurrent.final_state = recurrent.in.initial_state;
    recurrent.in.initial_state_indices = recurrent.final_state_indices = index_tensor();
    ASSERT_EQ(run(recurrent, isa), "");
    expect_final("recurrent");

    gd_backward_args backward = p.backward;
    const auto backward_truth = reference_backward(backward);
    move_to_pool(backward.in.initial_state, slots_);
    backward.in.initial_state_indices = index_tensor();
    ASSERT_EQ(run(backward, isa), "");
    for (const auto& [got, truth] : {std::pair(&backward.dg, &backward_truth.dg), {&backward.dk, &backward_truth.dk}}) {
      const auto result = compare(to_doubles(*got), *truth, head_shape(*got, 2), {1e-5, 0});
      EXPECT_TRUE(result.ok) << "backward " << gd_isa_name(isa) << ": " << result.text();
    }
  }
}

}  // namespace
}  // namespace gatedelta::testing
