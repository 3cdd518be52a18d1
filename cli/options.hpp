// The command line: flags a command declares, "key=value" words that make up a case, and what they mean.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gatedelta/gatedelta.h"

namespace gatedelta::cli {

// Something the user wrote is wrong: exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Flag {
  const char* name;   // "--threads"
  const char* value;  // "N", or null for a switch
  const char* help;
};

class Options {
 public:
  // Throws UsageError for anything that is neither a declared flag nor a "key=value" word (where words are allowed).
  Options(const std::vector<std::string>& arguments, const std::vector<Flag>& flags, bool words);

  bool has(const std::string& name) const { return get(name).has_value(); }
  std::optional<std::string> get(const std::string& name) const;
  int64_t integer(const std::string& name, int64_t otherwise, int64_t lowest, int64_t highest) const;
  double number(const std::string& name, double otherwise, double lowest, double highest) const;
  const std::string& words() const { return words_; }  // joined by spaces

 private:
  std::vector<std::pair<std::string, std::string>> values_;
  std::string words_;
};

enum class Op { forward, backward, train, recurrent };
const char* name_of(Op op);
std::vector<Op> parse_ops(const std::string& list);  // "fwd,bwd"

// Where a command runs.
struct Device {
  bool cuda = false;
  int index = 0;  // of the CUDA device
  gd_kernels kernels = GD_KERNELS_AUTO;
  std::string name() const {
    if (!cuda) return "cpu";
    return "cuda:" + std::to_string(index) + (kernels == GD_KERNELS_PORTABLE ? " portable" : "");
  }
};

// "all" = every usable one, "auto" = the library's choice, or names separated by commas. Refuses what cannot run here.
std::vector<gd_isa> parse_isas(const std::string& list);

gd_info get_info();
std::string version_text(const gd_info& info);  // "0.1.0"
// Replaces GD_ISA_AUTO by the best instruction set of this machine.
gd_isa resolve(gd_isa isa);

// A thread pool of the library.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool() { gd_thread_pool_destroy(pool_); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  gd_thread_pool* get() const { return pool_; }

 private:
  gd_thread_pool* pool_ = nullptr;
};

// The commands. Each returns the exit status.
int info_command(const std::vector<std::string>& arguments);
int run_command(const std::vector<std::string>& arguments);
int check_command(const std::vector<std::string>& arguments);
int bench_command(const std::vector<std::string>& arguments);
extern const std::vector<Flag> kInfoFlags, kRunFlags, kCheckFlags, kBenchFlags;

}  // namespace gatedelta::cli
