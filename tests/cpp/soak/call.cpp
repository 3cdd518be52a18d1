#include "call.hpp"

#include <algorithm>
#include <cstring>

#include "testing/contents.hpp"

namespace gatedelta::soak {

namespace {

constexpr size_t kGuard = 512, kAlign = 256;

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

const char* name_of(Operation operation) {
  constexpr const char* kNames[kOperations] = {
      "forward", "backward",      "training",        "recurrent",  "decode_chain",        "context_parallel",
      "conv1d",  "conv1d_update", "conv1d_backward", "gated_norm", "gated_norm_backward", "layer_step"};
  return kNames[static_cast<int>(operation)];
}

size_t extent_bytes(const gd_tensor& t) {
  int64_t last = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 0) return 0;
    last += (t.shape[d] - 1) * t.stride[d];
  }
  return static_cast<size_t>((last + 1) * testing::element_bytes(t.dtype));
}

Call::Call(Operation of, std::string line, std::vector<std::unique_ptr<Step>> calls,
           std::span<const char> outside_memory, std::vector<Outside> outside)
    : operation(of), text(std::move(line)), steps(std::move(calls)), outside_(std::move(outside)) {
  const auto is_outside = [&](const void* data) {
    return !outside_memory.empty() && data >= outside_memory.data() &&
           data < outside_memory.data() + outside_memory.size();
  };
  end_ = kGuard;
  for (const auto& step : steps) {
    const auto tensors = step->tensors();
    const bool cuda = step->exec().device == GD_CUDA;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const gd_tensor& t = *tensors[i];
      if (!t.data || is_outside(t.data)) continue;
      // Rows must be aligned on a GPU, everything else lies as it was.
      const size_t misalign = cuda && i < step->row_tensors() ? 0 : reinterpret_cast<uintptr_t>(t.data) % 64;
      add_part(t.data, extent_bytes(t), misalign, false, std::string(step->name()) + ", tensor " + std::to_string(i));
    }
    if (step->saved()) add_part(step->saved(), step->saved_bytes(), 0, true, "saved");
  }
  storage_.assign(end_ + kAlign, testing::kPoison);
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  block_ = {storage_.data() + (kAlign - address % kAlign) % kAlign, end_};
  for (const Part& part : parts_)
    if (!part.is_scratch) std::memcpy(block_.data() + part.begin, part.source, part.bytes);
  for (const auto& step : steps) {
    step->move([&](void* data) {
      if (is_outside(data)) return static_cast<char*>(data);
      const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) {
        return data == p.source || (data > p.source && data < p.source + p.bytes);
      });
      return block_.data() + part->begin + (static_cast<const char*>(data) - part->source);
    });
  }
  for (Part& part : parts_) part.source = nullptr;
  first_.assign(block_.begin(), block_.end());
}

void Call::add_part(const void* source, size_t bytes, size_t misalign, bool is_scratch, const std::string& name) {
  const auto* const from = static_cast<const char*>(source);
  const auto holds = [&](const Part& p) { return from == p.source || (from > p.source && from < p.source + p.bytes); };
  if (std::any_of(parts_.begin(), parts_.end(), holds)) return;
  const size_t begin = rounded_up(end_, kAlign) + misalign;
  parts_.push_back({from, begin, bytes, is_scratch, name});
  end_ = begin + bytes + kGuard;
}

void Call::reset() {
  std::copy(first_.begin(), first_.end(), block_.begin());
  for (const Outside& slot : outside_) std::copy(slot.first.begin(), slot.first.end(), slot.live);
}

void Call::keep(std::span<const char> got) {
  expected_.assign(got.begin(), got.end());
  for (Outside& slot : outside_) slot.expected.assign(slot.live, slot.live + slot.first.size());
}

std::string Call::first_difference(std::span<const char> got, size_t begin, size_t end) const {
  if (std::memcmp(got.data() + begin, expected_.data() + begin, end - begin) == 0) return "";
  while (got[begin] == expected_[begin]) ++begin;
  for (const Part& part : parts_) {
    if (begin >= part.begin && begin < part.begin + part.bytes)
      return part.name + ", byte " + std::to_string(begin - part.begin) + " differs from the serial run's";
  }
  return "byte " + std::to_string(begin) + ", in a guard zone, was written";
}

std::string Call::difference(std::span<const char> got) const {
  size_t begin = 0;
  for (const Part& part : parts_) {
    if (!part.is_scratch) continue;
    if (std::string found = first_difference(got, begin, part.begin); !found.empty()) return found;
    begin = part.begin + part.bytes;
  }
  if (std::string found = first_difference(got, begin, end_); !found.empty()) return found;
  for (size_t i = 0; i < outside_.size(); ++i) {
    if (std::memcmp(outside_[i].live, outside_[i].expected.data(), outside_[i].expected.size()) != 0)
      return "slot " + std::to_string(i) + " of this process in the shared pool differs from the serial run's";
  }
  return "";
}

}  // namespace gatedelta::soak
