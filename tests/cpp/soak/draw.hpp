// Random calls of every operation: a pure function of the dice and of what the calls are for.
#pragma once

#include <list>
#include <memory>
#include <span>
#include <vector>

#include "call.hpp"
#include "testing/case.hpp"
#include "testing/tolerance.hpp"

namespace gatedelta::soak {

// What calls are drawn for.
struct Target {
  bool cuda = false;
  gd_kernels kernels = GD_KERNELS_AUTO;
  std::vector<gd_isa> isas = {};  // CPU: the usable ones
};

// Slots of a pool of fp32 states [., 2, 32, 32] that belong to one process. Others lie between them.
struct OwnSlots {
  gd_tensor pool;
  std::vector<int64_t> slots;
};

using Made = std::unique_ptr<Call>;
Made draw_forward(Dice& dice, const Target& target);
Made draw_backward(Dice& dice, const Target& target);
Made draw_training(Dice& dice, const Target& target);
Made draw_recurrent(Dice& dice, const Target& target);
Made draw_context_parallel(Dice& dice, const Target& target);
Made draw_conv1d(Dice& dice, const Target& target);
Made draw_conv1d_update(Dice& dice, const Target& target);
Made draw_conv1d_backward(Dice& dice, const Target& target);
Made draw_gated_norm(Dice& dice, const Target& target);
Made draw_gated_norm_backward(Dice& dice, const Target& target);
Made draw_layer_step(Dice& dice, const Target& target);
// With `shared` on the CPU, over a pool in memory that processes share.
Made draw_decode_chain(Dice& dice, const Target& target, const OwnSlots* shared = nullptr);
// Any of these.
Made draw(Operation operation, Dice& dice, const Target& target);

// ---- what the files of this folder share ----------------------------------------------------------------------------

gd_exec draw_exec(Dice& dice, const Target& target);
testing::Compute compute_of(gd_dtype dtype, const gd_exec& exec);

// The types, gates, heads and sizes of a call of the rule; on a GPU often those of Hopper's own kernels.
testing::Case draw_layer(Dice& dice, const Target& target);

class Steps {
 public:
  template <class Args>
  Steps& add(Args args, const gd_exec& exec) {
    const gd_tuning* const tuning = args.exec.tuning;
    args.exec = exec;
    args.exec.tuning = tuning;
    steps_.push_back(std::make_unique<StepOf<Args>>(args));
    return *this;
  }
  std::vector<std::unique_ptr<Step>> take() { return std::move(steps_); }

 private:
  std::vector<std::unique_ptr<Step>> steps_;
};

// Tensors beside those of a problem, contiguous and NaN at first.
class Extras {
 public:
  gd_tensor make(gd_dtype dtype, const std::vector<int64_t>& shape);
  gd_tensor indices(const std::vector<int64_t>& values, std::vector<int64_t> shape = {});
  char* bytes(size_t count) { return buffers_.emplace_back(count).data(); }

 private:
  std::list<testing::Buffer> buffers_;
};

// What a drawn call needs, and nothing twice. The judge of a call gets its results, see Call::copy_results.
template <class Args, class Run>
Made make_call(Operation operation, const std::string& text, Dice& dice, const Target& target, const Args& args,
               const Run& judge) {
  const gd_exec exec = draw_exec(dice, target);
  auto call = std::make_unique<Call>(operation, text, Steps().add(args, exec).take());
  call->judge = [judge, exec, call = call.get()] {
    return judge(exec, [call](const Args& to) {
      call->copy_results(0, to);
      return std::string();
    });
  };
  return call;
}

}  // namespace gatedelta::soak
