#include "tensor.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace gatedelta::binding {

const Codes codes;

void fail(const std::string& message) { throw std::runtime_error("gatedelta failed: " + message); }

void refuse(const std::string& message) { throw std::runtime_error("gatedelta: " + message); }

void check_torch(AOTITorchError error, const char* call) {
  if (error == 0) return;
  static const auto what = reinterpret_cast<decltype(&torch_exception_get_what_without_backtrace)>(
      dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* text = what ? what() : nullptr;
  fail(text && *text ? text : "torch failed in " + std::string(call, std::strcspn(call, "(")));
}

void check(gd_status status) {
  if (status == GD_OK) return;
  const std::string message = gd_last_error();
  if (status == GD_UNSUPPORTED) refuse("unsupported: " + message);
  if (status == GD_INVALID_ARGUMENT || status == GD_WORKSPACE_TOO_SMALL) refuse(message);
  fail(message);
}

namespace {

std::string dtype_name(int32_t dtype) {
  static const struct {
    int32_t code;
    const char* name;
  } kNames[] = {
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const auto& [code, name] : kNames) {
    if (code == dtype) return name;
  }
  return "torch's number " + std::to_string(dtype);
}

// The library itself refuses an integer where it needs a real number, and the reverse; this refuses the rest.
int32_t gd_dtype_of(const Tensor& tensor, const char* name, Kind kind) {
  const int32_t dtype = tensor.dtype();
  if (dtype == codes.f32) return GD_F32;
  if (dtype == codes.bf16) return GD_BF16;
  if (dtype == codes.f16) return GD_F16;
  if (dtype == codes.i64) return GD_I64;
  if (dtype == codes.i32) return GD_I32;
  refuse(std::string(name) + ": dtype is " + dtype_name(dtype) + ", must be " +
         (kind == Kind::index ? "int32 or int64" : "float32, bfloat16 or float16"));
}

}  // namespace

bool is_dense(const gd_tensor& tensor, int32_t dims) {
  int64_t stride = 1;
  for (int32_t i = tensor.rank - 1; i >= 0 && i >= tensor.rank - dims; --i) {
    if (tensor.stride[i] != stride && tensor.shape[i] != 1) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

Device::Device(const Tensor& tensor, const char* name)
    : type(tensor.device_type()), index(tensor.device_index()), first(name) {
  if (type != codes.cpu && !is_cuda()) refuse(std::string(first) + " is neither on the CPU nor on a CUDA device");
}

Tensor Device::empty(int64_t rank, const int64_t* sizes, int32_t dtype) const {
  int64_t strides[GD_MAX_RANK];
  int64_t stride = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  AtenTensorHandle handle = nullptr;
  GD_TORCH(aoti_torch_empty_strided(rank, sizes, strides, dtype, type, index, &handle));
  return Tensor(handle);
}

void Device::check(const Tensor& tensor, const char* name) const {
  if (tensor.device_type() != type || tensor.device_index() != index) {
    refuse(std::string(name) + " is not on the device " + first + " is on");
  }
}

gd_tensor Device::describe(const Tensor& tensor, const char* name, Kind kind) const {
  gd_tensor result{};
  const int64_t rank = tensor.rank();
  if (rank > GD_MAX_RANK) {
    refuse(std::string(name) + " has rank " + std::to_string(rank) + ", more than any tensor here");
  }
  check(tensor, name);
  result.dtype = gd_dtype_of(tensor, name, kind);
  result.rank = static_cast<int32_t>(rank);
  const int64_t* sizes = tensor.sizes();
  const int64_t* strides = tensor.strides();
  for (int64_t i = 0; i < rank; ++i) {
    result.shape[i] = sizes[i];
    result.stride[i] = strides[i];
  }
  return result;
}

gd_tensor Device::read(Tensor& tensor, const char* name, int32_t dims, Kind kind) const {
  if (!tensor) return gd_tensor{};
  gd_tensor result = describe(tensor, name, kind);
  if (!is_dense(result, dims)) {
    Tensor copy = empty_like(tensor);
    GD_TORCH(aoti_torch_copy_(copy.get(), tensor.get(), 0));
    tensor = std::move(copy);
    result = describe(tensor, name, kind);
  }
  const void* data = nullptr;
  GD_TORCH(torch_get_const_data_ptr(tensor.get(), &data));
  result.data = const_cast<void*>(data);
  return result;
}

gd_tensor Device::indices(Tensor& tensor, const char* name) const {
  if (!tensor) return gd_tensor{};
  const gd_tensor given = describe(tensor, name, Kind::index);
  bool expanded = false;
  for (int32_t i = 0; i < given.rank; ++i) expanded |= given.shape[i] > 1 && given.stride[i] == 0;
  return read(tensor, name, expanded ? given.rank : 0, Kind::index);
}

gd_tensor Device::output(const Tensor& tensor, const char* name) const {
  if (!tensor) return gd_tensor{};
  gd_tensor result = describe(tensor, name, Kind::real);
  GD_TORCH(torch_get_mutable_data_ptr(tensor.get(), &result.data));
  return result;
}

}  // namespace gatedelta::binding
