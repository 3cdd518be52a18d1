// What the soak runs over and over: one call of the C ABI, or several that belong together, on memory of their own.
//
// The memory of a call is one block, with a guard zone around every tensor. Whoever makes a call fills it as the
// generator does, so unused slots, gaps and padding hold NaN. A run begins with the block as it was made and is right
// where the block then has the bits that a serial run left there: outputs and pools, but also everything that must not
// be written.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "step.hpp"

namespace gatedelta::soak {

enum class Operation {
  forward,
  backward,
  training,  // a forward that saves, and a backward from it
  recurrent,
  decode_chain,      // steps of decode and draft verification that go on with each other's states
  context_parallel,  // both summaries, each with a merge
  conv1d,
  conv1d_update,  // decode and draft windows
  conv1d_backward,
  gated_norm,
  gated_norm_backward,
  layer_step
};
inline constexpr int kOperations = 12;
const char* name_of(Operation operation);

// What an engine keeps of a call on its device.
class OnDevice {
 public:
  virtual ~OnDevice() = default;
};

class Call {
 public:
  // A place outside of the block that the call writes, too: one of its slots of a pool that processes share.
  struct Outside {
    char* live;
    std::vector<char> first, expected;
  };

  // Copies what the tensors of the steps point to; `saved` alone is scratch, of which the contents do not matter.
  // Pointers into `outside_memory` stay as they are.
  Call(Operation operation, std::string text, std::vector<std::unique_ptr<Step>> steps,
       std::span<const char> outside_memory = {}, std::vector<Outside> outside = {});

  Operation operation;
  std::string text;
  std::vector<std::unique_ptr<Step>> steps;  // on `block`
  std::function<std::string()> judge;        // the serial run's results against the truth, where there is one
  std::unique_ptr<OnDevice> on_device;
  std::mutex busy;

  std::span<char> block() { return block_; }
  const std::vector<char>& first() const { return first_; }
  void reset();
  // Takes the block, or a copy of it from a device, as the bits that every run must leave.
  void keep(std::span<const char> got);
  // "" or where other bits are.
  std::string difference(std::span<const char> got) const;
  // The serial run's results into tensors of the same shapes, for a judge.
  template <class Args>
  void copy_results(size_t step, const Args& to);

 private:
  struct Part {
    const char* source;
    size_t begin, bytes;
    bool is_scratch;
    std::string name;
  };
  void add_part(const void* source, size_t bytes, size_t misalign, bool is_scratch, const std::string& name);
  std::string first_difference(std::span<const char> got, size_t begin, size_t end) const;

  std::vector<Part> parts_;
  size_t end_ = 0;
  std::vector<char> storage_, first_, expected_;
  std::span<char> block_;
  std::vector<Outside> outside_;
};

size_t extent_bytes(const gd_tensor& t);  // from the first element to the last, with the gaps between

template <class Args>
void Call::copy_results(size_t step, const Args& to) {
  const auto tensors = testing::CallOf<Args>::tensors(to);
  const auto ours = steps[step]->tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i]->data) continue;
    const char* const from = expected_.data() + (static_cast<char*>(ours[i]->data) - block_.data());
    std::copy(from, from + extent_bytes(*tensors[i]), static_cast<char*>(tensors[i]->data));
  }
}

}  // namespace gatedelta::soak
