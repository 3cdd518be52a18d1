// What a command prints, and the file --json names.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>

#include "cli/json.hpp"
#include "cli/options.hpp"

namespace gatedelta::cli {

// With "--json -" the JSON is all that the standard output holds: print() then prints nothing.
class Report {
 public:
  // Refuses a path that cannot be written before the command spends time on results. Appending keeps an older file as
  // it is until there are results to replace it.
  explicit Report(const Options& options) : path_(options.get("--json")) {
    if (path_ && !to_stdout() && !std::ofstream(*path_, std::ios::app)) throw UsageError("cannot write " + *path_);
  }

  bool to_stdout() const { return path_ == "-"; }

  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) const {
    if (to_stdout()) return;
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    std::fflush(stdout);
  }

  // For what went wrong: it goes to the error stream where print() prints nothing.
  [[gnu::format(printf, 2, 3)]] void print_problem(const char* format, ...) const {
    std::FILE* const out = to_stdout() ? stderr : stdout;
    va_list values;
    va_start(values, format);
    std::vfprintf(out, format, values);
    va_end(values);
    std::fflush(out);
  }

  void write(const Json& results) const {
    if (!path_) return;
    if (to_stdout()) {
      std::cout << results.text() << std::endl;
      return;
    }
    std::ofstream file(*path_);
    file << results.text() << "\n";
    file.close();
    if (!file) throw std::runtime_error("cannot write " + *path_);
  }

 private:
  std::optional<std::string> path_;
};

}  // namespace gatedelta::cli
