// torch's tensors, and the device of a call: what the operators read from them and allocate beside them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "gatedelta/gatedelta.h"
#include "shim.h"

namespace gatedelta::binding {

// torch makes a RuntimeError of every C++ exception, so the text begins with what it is, and
// python/gatedelta/_operators/refusals.py raises what it should be. A failure of the library's, of torch's or of a
// device's:
[[noreturn]] void fail(const std::string& message);
// A mistake of the caller's, or behind "unsupported: " a legal call that this build or device does not serve:
[[noreturn]] void refuse(const std::string& message);

// Throws torch's own message where this torch gives it (2.13 and newer).
void check_torch(AOTITorchError error, const char* call);
#define GD_TORCH(call) ::gatedelta::binding::check_torch(call, #call)

// Throws the library's message, as one of these two.
void check(gd_status status);

// torch's numbers of dtypes and devices, read once, when this library is loaded.
struct Codes {
  int32_t f32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16();
  int32_t i64 = aoti_torch_dtype_int64(), i32 = aoti_torch_dtype_int32(), u8 = aoti_torch_dtype_uint8();
  int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
};
extern const Codes codes;

// An owned reference to a torch tensor, or none.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  int64_t rank() const {
    int64_t rank = 0;
    GD_TORCH(aoti_torch_get_dim(handle_, &rank));
    return rank;
  }
  const int64_t* sizes() const {
    int64_t* sizes = nullptr;
    GD_TORCH(aoti_torch_get_sizes(handle_, &sizes));
    return sizes;
  }
  const int64_t* strides() const {
    int64_t* strides = nullptr;
    GD_TORCH(aoti_torch_get_strides(handle_, &strides));
    return strides;
  }
  int32_t dtype() const {
    int32_t dtype = 0;
    GD_TORCH(aoti_torch_get_dtype(handle_, &dtype));
    return dtype;
  }
  int32_t device_type() const {
    int32_t type = 0;
    GD_TORCH(aoti_torch_get_device_type(handle_, &type));
    return type;
  }
  int32_t device_index() const {
    int32_t index = 0;
    GD_TORCH(aoti_torch_get_device_index(handle_, &index));
    return index;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// A boxed kernel's arguments, taken over in schema order. Nothing here throws, so nothing leaks on an early error.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return Tensor(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  Tensor optional_tensor() {
    const std::unique_ptr<StableIValue> value(reinterpret_cast<StableIValue*>(*next_++));
    return value ? Tensor(reinterpret_cast<AtenTensorHandle>(*value)) : Tensor();
  }
  std::optional<double> optional_float() {
    const std::unique_ptr<StableIValue> value(reinterpret_cast<StableIValue*>(*next_++));
    if (!value) return std::nullopt;
    double number;
    std::memcpy(&number, value.get(), sizeof number);
    return number;
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  bool boolean() { return static_cast<uint8_t>(*next_++) != 0; }

 private:
  StableIValue* next_;
};

inline StableIValue returned(Tensor tensor) { return reinterpret_cast<StableIValue>(tensor.release()); }

// Whether the last `dims` dimensions are contiguous.
bool is_dense(const gd_tensor& tensor, int32_t dims);

// Which dtypes an argument may have.
enum class Kind { real, index };

// Device every tensor of a call must be on, and the place new ones go.
struct Device {
  int32_t type, index;
  const char* first;  // the tensor whose device it is

  explicit Device(const Tensor& tensor, const char* name = "q");
  bool is_cuda() const { return type == codes.cuda; }

  Tensor empty(int64_t rank, const int64_t* sizes, int32_t dtype) const;
  Tensor empty_bytes(size_t bytes) const {
    const int64_t size = static_cast<int64_t>(bytes);
    return empty(1, &size, codes.u8);
  }
  Tensor empty_like(const Tensor& other) const { return empty(other.rank(), other.sizes(), other.dtype()); }
  Tensor nothing() const { return empty_bytes(0); }  // an output the caller did not request

  void check(const Tensor& tensor, const char* name) const;

  // Takes the tensor as it is if its last `dims` dimensions are contiguous, as the kernels need them; otherwise
  // replaces it by a copy. An absent tensor gives an absent gd_tensor.
  gd_tensor input(Tensor& tensor, const char* name, int32_t dims = 0) const {
    return read(tensor, name, dims, Kind::real);
  }
  gd_tensor offsets(Tensor& tensor, const char* name) const { return read(tensor, name, 1, Kind::index); }
  // Any strides, but an expanded tensor is copied: the library takes no slots to write of which several are one entry.
  gd_tensor indices(Tensor& tensor, const char* name) const;
  gd_tensor output(const Tensor& tensor, const char* name) const;

 private:
  gd_tensor describe(const Tensor& tensor, const char* name, Kind kind) const;
  gd_tensor read(Tensor& tensor, const char* name, int32_t dims, Kind kind) const;
};

}  // namespace gatedelta::binding
