// A small valid call of each operation. Tests change one thing and see what the library says and touches.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gatedelta/gatedelta.hpp"

namespace gatedelta::test {

constexpr int64_t kB = 2, kT = 70, kHk = 2, kHv = 4, kK = 16, kV = 32;
constexpr int64_t kChunkTokens = GD_CHUNK;

// Memory of a call, every byte of which is compared after a refusal. Outputs start as 0xa5.
class Memory {
 public:
  void* take(size_t bytes, unsigned char fill) {
    Block& block = blocks_.emplace_back();
    block.memory.reserve(bytes ? bytes : 1);
    std::memset(block.memory.data(), fill, bytes ? bytes : 1);
    return block.memory.data();
  }
  void remember() {
    for (Block& block : blocks_) {
      const char* data = static_cast<const char*>(block.memory.data());
      block.before.assign(data, data + block.memory.size());
    }
  }
  bool untouched() const {
    for (const Block& block : blocks_)
      if (std::memcmp(block.before.data(), block.memory.data(), block.before.size()) != 0) return false;
    return true;
  }

 private:
  struct Block {
    Workspace memory;
    std::vector<char> before;
  };
  std::list<Block> blocks_;
};

inline size_t element_bytes(gd_dtype dtype) {
  return dtype == GD_I64 ? 8 : dtype == GD_BF16 || dtype == GD_F16 ? 2 : 4;
}

inline gd_tensor dense(void* data, gd_dtype dtype, std::initializer_list<int64_t> shape) {
  return tensor(data, dtype, shape);
}

inline int64_t elements(std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

inline gd_status call(const gd_forward_args& args) { return gd_forward(&args); }
inline gd_status call(const gd_backward_args& args) { return gd_backward(&args); }
inline gd_status call(const gd_recurrent_args& args) { return gd_recurrent(&args); }
inline gd_status call(const gd_summary_args& args) { return gd_summary(&args); }
inline gd_status call(const gd_backward_summary_args& args) { return gd_backward_summary(&args); }
inline gd_status call(const gd_conv1d_args& args) { return gd_conv1d(&args); }
inline gd_status call(const gd_conv1d_backward_args& args) { return gd_conv1d_backward(&args); }
inline gd_status call(const gd_gated_norm_args& args) { return gd_gated_norm(&args); }
inline gd_status call(const gd_gated_norm_backward_args& args) { return gd_gated_norm_backward(&args); }
inline gd_status call(const gd_layer_step_args& args) { return gd_layer_step(&args); }
inline gd_status query(const gd_forward_args& args, size_t* bytes) { return gd_forward_workspace(&args, bytes); }
inline gd_status query(const gd_backward_args& args, size_t* bytes) { return gd_backward_workspace(&args, bytes); }
inline gd_status query(const gd_recurrent_args& args, size_t* bytes) { return gd_recurrent_workspace(&args, bytes); }
inline gd_status query(const gd_summary_args& args, size_t* bytes) { return gd_summary_workspace(&args, bytes); }
inline gd_status query(const gd_backward_summary_args& args, size_t* bytes) {
  return gd_backward_summary_workspace(&args, bytes);
}

// A call with its memory.
template <class Args>
struct Call : Args {
  Memory memory;
  Workspace workspace{size_t{8} << 20};

  Call() : Args{} {
    this->struct_size = sizeof(Args);
    this->exec.workspace = workspace.data();
    this->exec.workspace_bytes = workspace.size();
  }

  // fp32 filled with one value; the numbers do not matter here.
  gd_tensor input(std::initializer_list<int64_t> shape, float value = 0.1f) {
    const auto count = static_cast<size_t>(elements(shape));
    auto* data = static_cast<float*>(memory.take(count * sizeof(float), 0));
    std::fill(data, data + count, value);
    return tensor(data, shape);
  }
  gd_tensor output(std::initializer_list<int64_t> shape, gd_dtype dtype = GD_F32) {
    return dense(memory.take(static_cast<size_t>(elements(shape)) * element_bytes(dtype), 0xa5), dtype, shape);
  }
  template <class T>
  gd_tensor copy(std::initializer_list<T> values) {
    auto* data = static_cast<T*>(memory.take(values.size() * sizeof(T), 0));
    std::copy(values.begin(), values.end(), data);
    return tensor(data, {static_cast<int64_t>(values.size())});
  }
  gd_tensor indices(std::initializer_list<int64_t> values) { return copy(values); }
  template <class... T>
  gd_tensor indices(T... values) {
    return copy<int64_t>({values...});
  }
  template <class... T>
  gd_tensor indices32(T... values) {
    return copy<int32_t>({values...});
  }

  testing::AssertionResult accepts() const {
    const gd_status status = call(*this);
    if (status == GD_OK) return testing::AssertionSuccess();
    return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
  }
  // The call returns `expected` with a message that contains `text`, and no byte outside the workspace changes.
  testing::AssertionResult refuses(gd_status expected, const std::string& text) {
    memory.remember();
    const gd_status status = call(*this);
    if (status != expected) return testing::AssertionFailure() << gd_status_name(status) << ": " << gd_last_error();
    if (std::string(gd_last_error()).find(text) == std::string::npos)
      return testing::AssertionFailure() << "the message is: " << gd_last_error();
    if (!memory.untouched()) return testing::AssertionFailure() << "the refused call wrote to the caller's memory";
    return testing::AssertionSuccess();
  }
  testing::AssertionResult invalid(const std::string& text) { return refuses(GD_INVALID_ARGUMENT, text); }
};

// A change to a valid call, and what the library says to the changed call; without a message the call is accepted. A
// row without a name changes the call of the row above once more.
template <class Operation>
struct Rule {
  const char* name;
  void (*change)(Operation&);
  std::string message = {};
  gd_status status = GD_INVALID_ARGUMENT;
};
template <class Operation>
void check_rules(std::initializer_list<Rule<Operation>> rules) {
  std::optional<Operation> changed;
  const char* name = "";
  for (const Rule<Operation>& rule : rules) {
    if (*rule.name) name = rule.name, changed.emplace();
    SCOPED_TRACE(std::string(name) + ": " + rule.message);
    rule.change(*changed);
    if (rule.message.empty()) {
      EXPECT_TRUE(changed->accepts());
    } else {
      EXPECT_TRUE(changed->refuses(rule.status, rule.message));
    }
  }
}

// What the operations of the rule have in common.
template <class Args>
struct Case : Call<Args> {
  using Args::exec;
  using Args::in;

  Case() {
    in.q = this->input({kB, kT, kHk, kK});
    in.k = this->input({kB, kT, kHk, kK});
    in.v = this->input({kB, kT, kHv, kV});
    in.g = this->input({kB, kT, kHv}, -0.1f);
    in.beta = this->input({kB, kT, kHv}, 0.5f);
  }
  gd_tensor state(int64_t slots) { return this->input({slots, kHv, kK, kV}); }
  gd_tensor state_output(int64_t slots) { return this->output({slots, kHv, kK, kV}); }

  // Turns the batch into one row of packed sequences.
  template <class... T>
  void pack(T... offsets) {
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta}) make_row(*t);
    in.cu_seqlens = this->indices(offsets...);
  }
  static void make_row(gd_tensor& t) {
    t.shape[1] *= t.shape[0];
    t.shape[0] = 1;
  }
  gd_status query(size_t* bytes) const { return test::query(*this, bytes); }
};

struct ForwardCase : Case<gd_forward_args> {
  ForwardCase() { out = output({kB, kT, kHv, kV}); }
  template <class... T>
  void pack(T... offsets) {
    Case::pack(offsets...);
    make_row(out);
  }
};

struct BackwardCase : Case<gd_backward_args> {
  BackwardCase() {
    do_ = input({kB, kT, kHv, kV});
    dq = output({kB, kT, kHk, kK});
    dk = output({kB, kT, kHk, kK});
    dv = output({kB, kT, kHv, kV});
    dg = output({kB, kT, kHv});
    dbeta = output({kB, kT, kHv});
  }
  template <class... T>
  void pack(T... offsets) {
    Case::pack(offsets...);
    for (gd_tensor* t : {&do_, &dq, &dk, &dv, &dg, &dbeta}) make_row(*t);
  }
};

struct RecurrentCase : Case<gd_recurrent_args> {
  RecurrentCase() { out = output({kB, kT, kHv, kV}); }
  template <class... T>
  void pack(T... offsets) {
    Case::pack(offsets...);
    make_row(out);
  }
};

// Sequence n of a contiguous fp32 [B, T, ...] tensor.
inline std::span<float> sequence_of(const gd_tensor& t, int64_t n) {
  return {static_cast<float*>(t.data) + n * t.stride[0], static_cast<size_t>(t.stride[0])};
}

using Operations = testing::Types<ForwardCase, BackwardCase, RecurrentCase>;

}  // namespace gatedelta::test
