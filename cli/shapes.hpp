// Lists of cases: csv files whose columns are the keys of a case (testing/generator.hpp), plus `name` and `op`.
#pragma once

#include <string>
#include <vector>

#include "cli/options.hpp"
#include "testing/generator.hpp"

namespace gatedelta::cli {

struct Shape {
  std::string name;
  testing::Case spec;
  std::vector<Op> ops;  // empty = the command's own choice
};

// Empty cells keep the default, lines that start with # are comments. Throws UsageError with file and line.
std::vector<Shape> read_shapes(const std::string& path);
// The cases of a command line: from --shapes, from words, both (words then change every case), or `otherwise`.
std::vector<Shape> chosen_shapes(const Options& options, const std::vector<Shape>& otherwise);
// The operations to run on a shape: --op decides, then the file, then `otherwise`.
std::vector<Op> chosen_ops(const Options& options, const Shape& shape, const std::vector<Op>& otherwise);

}  // namespace gatedelta::cli
