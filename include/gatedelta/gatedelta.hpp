/* GateDelta's C++20 face: header-only, over the C ABI of gatedelta.h, which documents every field.
 *
 *     gatedelta::ThreadPool pool;
 *     gatedelta::Workspace workspace;
 *     gatedelta::ForwardArgs args;
 *     args.in.q = gatedelta::tensor(q, {B, T, Hk, K});   // q: const float*, const gatedelta::bf16*, ...
 *     ...
 *     pool.apply(args.exec);
 *     gatedelta::forward(args, workspace);               // throws gatedelta::Error
 */
#ifndef GATEDELTA_GATEDELTA_HPP
#define GATEDELTA_GATEDELTA_HPP

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "gatedelta/gatedelta.h"

namespace gatedelta {

// A call that was refused. what() is the library's message, which names the argument.
class Error : public std::runtime_error {
 public:
  Error(gd_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  gd_status status() const noexcept { return status_; }

 private:
  gd_status status_;
};

inline void check(gd_status status) {
  if (status != GD_OK) throw Error(status, gd_last_error());
}

// 16-bit floats as bit patterns; the library converts, the caller only stores them.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

template <class T>
inline constexpr gd_dtype dtype_of = GD_DTYPE_NONE;
template <>
inline constexpr gd_dtype dtype_of<float> = GD_F32;
template <>
inline constexpr gd_dtype dtype_of<bf16> = GD_BF16;
template <>
inline constexpr gd_dtype dtype_of<f16> = GD_F16;
template <>
inline constexpr gd_dtype dtype_of<std::int32_t> = GD_I32;
template <>
inline constexpr gd_dtype dtype_of<std::int64_t> = GD_I64;

// A view of memory whose element type is known only at run time. Strides are in elements; without them the tensor is
// contiguous. The C ABI has one tensor type for inputs and outputs: the library never writes through an input.
inline gd_tensor tensor(const void* data, gd_dtype dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides = {}) {
  if (shape.size() > GD_MAX_RANK || (strides.size() != 0 && strides.size() != shape.size()))
    throw Error(GD_INVALID_ARGUMENT, "tensor: " + std::to_string(shape.size()) + " sizes and " +
                                         std::to_string(strides.size()) + " strides, must be as many, at most " +
                                         std::to_string(GD_MAX_RANK));
  gd_tensor view = {};
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.rank = static_cast<std::int32_t>(shape.size());
  std::size_t d = 0;
  for (const std::int64_t size : shape) view.shape[d++] = size;
  d = 0;
  for (const std::int64_t stride : strides) view.stride[d++] = stride;
  if (strides.size() == 0) {
    std::int64_t stride = 1;
    for (d = shape.size(); d-- > 0;) {
      view.stride[d] = stride;
      // Unsigned, so that sizes too large for any memory reach the library, which refuses them.
      stride =
          static_cast<std::int64_t>(static_cast<std::uint64_t>(stride) * static_cast<std::uint64_t>(view.shape[d]));
    }
  }
  return view;
}

template <class T>
gd_tensor tensor(T* data, std::initializer_list<std::int64_t> shape, std::initializer_list<std::int64_t> strides = {}) {
  using Element = std::remove_cv_t<T>;
  static_assert(dtype_of<Element> != GD_DTYPE_NONE, "elements are float, bf16, f16, std::int32_t or std::int64_t");
  return tensor(data, dtype_of<Element>, shape, strides);
}

// The argument structs, ready to be filled in.
struct ForwardArgs : gd_forward_args {
  ForwardArgs() noexcept : gd_forward_args(GD_FORWARD_ARGS_INIT) {}
};
struct BackwardArgs : gd_backward_args {
  BackwardArgs() noexcept : gd_backward_args(GD_BACKWARD_ARGS_INIT) {}
};
struct SummaryArgs : gd_summary_args {
  SummaryArgs() noexcept : gd_summary_args(GD_SUMMARY_ARGS_INIT) {}
};
struct BackwardSummaryArgs : gd_backward_summary_args {
  BackwardSummaryArgs() noexcept : gd_backward_summary_args(GD_BACKWARD_SUMMARY_ARGS_INIT) {}
};
struct MergeArgs : gd_merge_args {
  MergeArgs() noexcept : gd_merge_args(GD_MERGE_ARGS_INIT) {}
};
struct Conv1dArgs : gd_conv1d_args {
  Conv1dArgs() noexcept : gd_conv1d_args(GD_CONV1D_ARGS_INIT) {}
};
struct Conv1dBackwardArgs : gd_conv1d_backward_args {
  Conv1dBackwardArgs() noexcept : gd_conv1d_backward_args(GD_CONV1D_BACKWARD_ARGS_INIT) {}
};
struct RecurrentArgs : gd_recurrent_args {
  RecurrentArgs() noexcept : gd_recurrent_args(GD_RECURRENT_ARGS_INIT) {}
};
struct GatedNormArgs : gd_gated_norm_args {
  GatedNormArgs() noexcept : gd_gated_norm_args(GD_GATED_NORM_ARGS_INIT) {}
};
struct GatedNormBackwardArgs : gd_gated_norm_backward_args {
  GatedNormBackwardArgs() noexcept : gd_gated_norm_backward_args(GD_GATED_NORM_BACKWARD_ARGS_INIT) {}
};
struct LayerStepArgs : gd_layer_step_args {
  LayerStepArgs() noexcept : gd_layer_step_args(GD_LAYER_STEP_ARGS_INIT) {}
};

namespace detail {
template <class Args>
std::size_t size_from(gd_status (*query)(const Args*, std::size_t*), const Args& args) {
  std::size_t bytes = 0;
  check(query(&args, &bytes));
  return bytes;
}
}  // namespace detail

inline std::size_t workspace_size(const gd_forward_args& args) { return detail::size_from(gd_forward_workspace, args); }
inline std::size_t workspace_size(const gd_backward_args& args) {
  return detail::size_from(gd_backward_workspace, args);
}
inline std::size_t workspace_size(const gd_summary_args& args) { return detail::size_from(gd_summary_workspace, args); }
inline std::size_t workspace_size(const gd_backward_summary_args& args) {
  return detail::size_from(gd_backward_summary_workspace, args);
}
inline std::size_t workspace_size(const gd_merge_args& args) { return detail::size_from(gd_merge_workspace, args); }
inline std::size_t workspace_size(const gd_conv1d_args& args) { return detail::size_from(gd_conv1d_workspace, args); }
inline std::size_t workspace_size(const gd_conv1d_backward_args& args) {
  return detail::size_from(gd_conv1d_backward_workspace, args);
}
inline std::size_t workspace_size(const gd_recurrent_args& args) {
  return detail::size_from(gd_recurrent_workspace, args);
}
inline std::size_t workspace_size(const gd_gated_norm_args& args) {
  return detail::size_from(gd_gated_norm_workspace, args);
}
inline std::size_t workspace_size(const gd_gated_norm_backward_args& args) {
  return detail::size_from(gd_gated_norm_backward_workspace, args);
}
inline std::size_t workspace_size(const gd_layer_step_args& args) {
  return detail::size_from(gd_layer_step_workspace, args);
}
// Bytes of `saved` that let the backward skip recomputing the forward.
inline std::size_t saved_size(const gd_forward_args& args) { return detail::size_from(gd_forward_saved_size, args); }
// Which call they are of; the backward takes it as saved_call.
inline gd_saved_call saved_call(const gd_forward_args& args) {
  gd_saved_call call{};
  check(gd_forward_saved_call(&args, &call));
  return call;
}

inline void forward(const gd_forward_args& args) { check(gd_forward(&args)); }
inline void backward(const gd_backward_args& args) { check(gd_backward(&args)); }
inline void summary(const gd_summary_args& args) { check(gd_summary(&args)); }
inline void backward_summary(const gd_backward_summary_args& args) { check(gd_backward_summary(&args)); }
inline void merge(const gd_merge_args& args) { check(gd_merge(&args)); }
inline void conv1d(const gd_conv1d_args& args) { check(gd_conv1d(&args)); }
inline void conv1d_backward(const gd_conv1d_backward_args& args) { check(gd_conv1d_backward(&args)); }
inline void recurrent(const gd_recurrent_args& args) { check(gd_recurrent(&args)); }
inline void gated_norm(const gd_gated_norm_args& args) { check(gd_gated_norm(&args)); }
inline void gated_norm_backward(const gd_gated_norm_backward_args& args) { check(gd_gated_norm_backward(&args)); }
inline void layer_step(const gd_layer_step_args& args) { check(gd_layer_step(&args)); }

// 64-byte aligned memory that grows on demand: for exec.workspace, and for `saved`.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(std::size_t bytes) { reserve(bytes); }
  Workspace(Workspace&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Workspace& operator=(Workspace&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Workspace() { release(); }

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

  // Makes it at least this large. Growing discards the contents.
  void reserve(std::size_t bytes) {
    if (bytes <= size_) return;
    release();
    data_ = ::operator new(bytes, kAlign);
    size_ = bytes;
  }

 private:
  static constexpr std::align_val_t kAlign{64};

  void release() noexcept {
    ::operator delete(data_, kAlign);
    data_ = nullptr;
    size_ = 0;
  }

  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// Gives the call `workspace`, and enlarges it where that is needed.
template <class Args>
void attach(Args& args, Workspace& workspace) {
  if (args.exec.device != GD_CPU)
    throw Error(GD_INVALID_ARGUMENT, "a Workspace is CPU memory: on CUDA set exec.workspace to device memory");
  workspace.reserve(workspace_size(args));
  args.exec.workspace = workspace.data();
  args.exec.workspace_bytes = workspace.size();
}

// The same calls in a workspace that can serve one call after another.
inline void forward(gd_forward_args& args, Workspace& workspace) {
  attach(args, workspace);
  forward(args);
}
inline void backward(gd_backward_args& args, Workspace& workspace) {
  attach(args, workspace);
  backward(args);
}
inline void summary(gd_summary_args& args, Workspace& workspace) {
  attach(args, workspace);
  summary(args);
}
inline void backward_summary(gd_backward_summary_args& args, Workspace& workspace) {
  attach(args, workspace);
  backward_summary(args);
}
inline void merge(gd_merge_args& args, Workspace& workspace) {
  attach(args, workspace);
  merge(args);
}
inline void conv1d(gd_conv1d_args& args, Workspace& workspace) {
  attach(args, workspace);
  conv1d(args);
}
inline void conv1d_backward(gd_conv1d_backward_args& args, Workspace& workspace) {
  attach(args, workspace);
  conv1d_backward(args);
}
inline void recurrent(gd_recurrent_args& args, Workspace& workspace) {
  attach(args, workspace);
  recurrent(args);
}
inline void gated_norm(gd_gated_norm_args& args, Workspace& workspace) {
  attach(args, workspace);
  gated_norm(args);
}
inline void gated_norm_backward(gd_gated_norm_backward_args& args, Workspace& workspace) {
  attach(args, workspace);
  gated_norm_backward(args);
}
inline void layer_step(gd_layer_step_args& args, Workspace& workspace) {
  attach(args, workspace);
  layer_step(args);
}

class ThreadPool {
 public:
  explicit ThreadPool(std::int32_t num_threads = 0) { check(gd_thread_pool_create(num_threads, &pool_)); }
  ThreadPool(ThreadPool&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)) {}
  ThreadPool& operator=(ThreadPool&& other) noexcept {
    std::swap(pool_, other.pool_);
    return *this;
  }
  ~ThreadPool() { gd_thread_pool_destroy(pool_); }

  std::int32_t size() const noexcept { return gd_thread_pool_size(pool_); }

  // Lets a call run on this pool, which must outlive it.
  void apply(gd_exec& exec) const noexcept {
    exec.parallel_for = gd_thread_pool_parallel_for;
    exec.parallel_for_context = pool_;
    exec.num_threads = size();
  }

 private:
  gd_thread_pool* pool_ = nullptr;
};

inline gd_info info() {
  gd_info result = GD_INFO_INIT;
  check(gd_get_info(&result));
  return result;
}

}  // namespace gatedelta
#endif
