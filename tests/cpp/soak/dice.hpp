// Random choices: a pure function of a seed and a stream.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <utility>
#include <vector>

#include "testing/generator.hpp"

namespace gatedelta::soak {

struct Dice {
  uint64_t seed, stream, throws = 0;

  int64_t below(int64_t limit) {
    return static_cast<int64_t>(testing::uniform(seed, stream, throws++) * static_cast<double>(limit));
  }
  bool one_in(int64_t many) { return below(many) == 0; }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  std::vector<int64_t> permutation(int64_t size) {
    std::vector<int64_t> values(static_cast<size_t>(size));
    std::iota(values.begin(), values.end(), 0);
    for (int64_t i = size - 1; i > 0; --i)
      std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(below(i + 1))]);
    return values;
  }
};

}  // namespace gatedelta::soak
