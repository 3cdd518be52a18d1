// What the soak programs share: random choices, tensors in memory of their own, a watchdog.
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing/device.hpp"
#include "testing/generator.hpp"

namespace gatedelta::testing {

constexpr int kPoison = DeviceMemory::kPoison;

struct Dice {
  uint64_t seed, stream, throws = 0;

  int64_t below(int64_t limit) { return static_cast<int64_t>(uniform(seed, stream, throws++) * double(limit)); }
  bool one_in(int64_t many) { return below(many) == 0; }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  std::vector<int64_t> permutation(int64_t size) {
    std::vector<int64_t> values(size);
    std::iota(values.begin(), values.end(), 0);
    for (int64_t i = size - 1; i > 0; --i) std::swap(values[i], values[below(i + 1)]);
    return values;
  }
};

inline gd_tensor contiguous(int32_t dtype, const std::vector<int64_t>& shape) {
  gd_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int64_t step = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.shape[axis] = shape[axis];
    t.stride[axis] = step;
    step *= shape[axis];
  }
  return t;
}

inline size_t bytes_of(const gd_tensor& t) { return static_cast<size_t>(element_count(t) * element_bytes(t.dtype)); }

// A part of `whole` with this shape that begins at a random multiple of `unit` elements.
inline gd_tensor part_of(const gd_tensor& whole, const std::vector<int64_t>& shape, int64_t unit, Dice& dice) {
  gd_tensor t = contiguous(whole.dtype, shape);
  const int64_t spare = element_count(whole) - element_count(t);
  if (spare < 0) throw std::logic_error("a batch needs more than the contents hold");
  t.data = static_cast<char*>(whole.data) + dice.below(spare / unit + 1) * unit * element_bytes(t.dtype);
  return t;
}

inline bool poisoned(const char* data, size_t bytes) {
  return bytes == 0 || (data[0] == static_cast<char>(kPoison) && std::memcmp(data, data + 1, bytes - 1) == 0);
}

template <class Word>
bool none_has(Word exponent, const char* data, size_t bytes) {
  bool found = false;
  for (size_t at = 0; at < bytes; at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, data + at, sizeof word);
    found |= (word & exponent) == exponent;
  }
  return !found;
}

inline bool all_finite(int32_t dtype, const char* data, size_t bytes) {
  return dtype == GD_F32    ? none_has<uint32_t>(0x7f800000, data, bytes)
         : dtype == GD_BF16 ? none_has<uint16_t>(0x7f80, data, bytes)
                            : none_has<uint16_t>(0x7c00, data, bytes);
}

class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes) { GD_CUDA_OK(cudaMallocHost(&data_, bytes)); }
  ~PinnedMemory() { cudaFreeHost(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

// Ends the program if the device hangs: nothing could continue.
class Watchdog {
 public:
  void begin(const std::string& what) {
    const std::lock_guard lock(mutex_);
    what_ = what;
    since_ = Clock::now();
    busy_ = true;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    busy_ = false;
  }
  std::string watched() {
    const std::lock_guard lock(mutex_);
    return what_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kLimit = std::chrono::seconds(20);

  void watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      wake_.wait_for(lock, stop, std::chrono::milliseconds(500), [] { return false; });
      if (!busy_ || Clock::now() - since_ < kLimit) continue;
      std::printf("HANG, more than %d s: %s\n", static_cast<int>(kLimit.count()), what_.c_str());
      std::fflush(stdout);
      std::_Exit(1);  // destructors would wait for the device
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::string what_;
  Clock::time_point since_;
  bool busy_ = false;
  std::jthread thread_{[this](const std::stop_token& stop) { watch(stop); }};  // the last member: it uses the others
};

// "--name number" pairs into the values of their names. False: something else.
inline bool read_options(const std::vector<std::string>& arguments,
                         const std::vector<std::pair<std::string, uint64_t*>>& options) {
  for (size_t i = 0; i < arguments.size(); i += 2) {
    const auto named = [&](const auto& option) { return option.first == arguments[i]; };
    const auto found = std::find_if(options.begin(), options.end(), named);
    if (found == options.end() || i + 1 == arguments.size()) return false;
    const char* const end = arguments[i + 1].data() + arguments[i + 1].size();
    const auto [stop, error] = std::from_chars(arguments[i + 1].data(), end, *found->second);
    if (error != std::errc() || stop != end) return false;
  }
  return true;
}

}  // namespace gatedelta::testing
