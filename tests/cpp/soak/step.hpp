// One call of the C ABI, whichever function it is of.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dice.hpp"
#include "testing/calls.hpp"
#include "testing/number.hpp"

namespace gatedelta::soak {

class Step {
 public:
  virtual ~Step() = default;
  virtual std::unique_ptr<Step> clone() const = 0;
  virtual const char* name() const = 0;
  virtual std::vector<gd_tensor*> tensors() = 0;  // in the order of CallOf, also those that are absent
  virtual size_t row_tensors() const = 0;
  virtual gd_exec& exec() = 0;
  virtual gd_status workspace(size_t* bytes) = 0;
  virtual gd_status run() = 0;
  // Every pointer to memory of the caller but the workspace.
  virtual void move(const std::function<char*(void*)>& to) = 0;
  virtual const void* saved() const = 0;
  virtual size_t saved_bytes() const = 0;
  // Spoils one argument of the call, which must be refused. Returns "" or what happened instead.
  virtual std::string refuse(Dice& dice) = 0;
};

template <class Args>
class StepOf final : public Step {
  using Call = testing::CallOf<Args>;

 public:
  explicit StepOf(const Args& args) : args_(args) {
    if (args.exec.tuning) tuning_ = *args.exec.tuning;
    args_.exec.tuning = nullptr;
    has_tuning_ = args.exec.tuning && tuning_.segment_chunks;
  }
  std::unique_ptr<Step> clone() const override { return std::make_unique<StepOf>(*this); }
  const char* name() const override { return Call::kName; }
  std::vector<gd_tensor*> tensors() override { return Call::tensors(args_); }
  size_t row_tensors() const override { return Call::kRowTensors; }
  gd_exec& exec() override {
    args_.exec.tuning = has_tuning_ ? &tuning_ : nullptr;  // here, because a copy's address is another one
    return args_.exec;
  }
  gd_status workspace(size_t* bytes) override { return Call::workspace(&args_, bytes); }
  gd_status run() override { return Call::run(&args_); }
  void move(const std::function<char*(void*)>& to) override {
    for (gd_tensor* t : tensors())
      if (t->data) t->data = to(t->data);
    if constexpr (requires { args_.saved; }) {
      if (args_.saved) args_.saved = to(const_cast<void*>(saved()));
    }
  }
  const void* saved() const override {
    if constexpr (requires { args_.saved; }) return args_.saved;
    return nullptr;
  }
  size_t saved_bytes() const override {
    if constexpr (requires { args_.saved; }) return args_.saved_bytes;
    return 0;
  }
  std::string refuse(Dice& dice) override;

 private:
  std::string check_refusal(const Args& bad, const char* what, gd_status expected = GD_OK) const;

  Args args_;
  gd_tuning tuning_{};
  bool has_tuning_ = false;
};

// expected: GD_OK stands for any refusal.
template <class Args>
std::string StepOf<Args>::check_refusal(const Args& bad, const char* what, gd_status expected) const {
  const gd_status status = Call::run(&bad);
  const bool refused = status != GD_OK && status != GD_INTERNAL && (expected == GD_OK || status == expected);
  if (refused && gd_last_error()[0]) return "";
  return std::string(name()) + " with " + what + " returned " + gd_status_name(status) +
         (refused ? " without a message" : "");
}

template <class Args>
std::string StepOf<Args>::refuse(Dice& dice) {
  Args bad = args_;
  std::vector<gd_tensor*> given;
  for (gd_tensor* t : Call::tensors(bad))
    if (t->data && testing::element_count(*t) > 0) given.push_back(t);
  const bool cuda = bad.exec.device == GD_CUDA;
  switch (dice.below(given.empty() ? 4 : 9)) {
    case 0: bad.struct_size = 3; return check_refusal(bad, "a struct of another ABI", GD_ABI_MISMATCH);
    case 1: bad.exec.device = 9; return check_refusal(bad, "an unknown device");
    case 2: bad.exec.reserved[1] = 1; return check_refusal(bad, "a reserved field set");
    case 3: (cuda ? bad.exec.isa : bad.exec.num_threads) = -1; return check_refusal(bad, "a bad isa or num_threads");
    case 4:
      given[static_cast<size_t>(dice.below(std::ssize(given)))]->dtype = 77;
      return check_refusal(bad, "an unknown dtype");
    case 5:
      given[static_cast<size_t>(dice.below(std::ssize(given)))]->data = nullptr;
      return check_refusal(bad, "a null pointer");
    case 6: given[0]->rank += 1; return check_refusal(bad, "a tensor of another rank");
    case 7: given[0]->shape[given[0]->rank - 1] += 1; return check_refusal(bad, "a size that does not fit");
    default:
      if (bad.exec.workspace_bytes > 0) {
        bad.exec.workspace_bytes -= 1;
        return check_refusal(bad, "a workspace one byte short", GD_WORKSPACE_TOO_SMALL);
      }
      if constexpr (requires { bad.in.initial_state_indices; }) {
        const gd_tensor& slots = bad.in.initial_state_indices;
        if (!cuda && slots.data) {  // only the CPU reads indices before it writes
          const double before = testing::load(slots.data, slots.dtype, 0);
          testing::store(slots.data, slots.dtype, 0, 1 << 29);
          std::string found = check_refusal(bad, "a slot that the pool does not have");
          testing::store(slots.data, slots.dtype, 0, before);
          return found;
        }
      }
      bad.struct_size = 3;
      return check_refusal(bad, "a struct of another ABI", GD_ABI_MISMATCH);
  }
}

}  // namespace gatedelta::soak
