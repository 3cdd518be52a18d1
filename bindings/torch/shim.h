// Declarations of the libtorch functions this binding calls: a small part of the stable C shim that libtorch_cpu.so
// exports since 2.10 (torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h). Declared here so that
// building needs no torch. tests/python/test_shim.py holds them against the headers of the torch that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;  // 0 = success

// One value on a boxed kernel's stack: bool, int64_t and double by their bytes, a tensor as an owned handle, an
// optional as null or as a pointer to a value made with `new`.
using StableIValue = uint64_t;

// Registration.
AOTITorchError aoti_torch_library_init_def(const char* ns, const char* file, uint32_t line, TorchLibraryHandle* ret);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs),
                                  uint64_t extension_build_version);

// Tensors. Pointers returned by the getters are borrowed.
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* ret);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* ret);
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

// Constants.
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_float8_e5m2();
int32_t aoti_torch_dtype_float8_e4m3fnuz();
int32_t aoti_torch_dtype_float8_e5m2fnuz();
int32_t aoti_torch_dtype_complex64();
int32_t aoti_torch_dtype_complex128();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();

// The calling thread's grad mode.
bool aoti_torch_grad_mode_is_enabled();

// torch's own threads, so that torch.set_num_threads() holds for us too.
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                  void (*func)(int64_t begin, int64_t end, void* context), void* context);
AOTITorchError torch_get_num_threads(uint32_t* ret);

// Looked up when needed, never linked to: the first is in libtorch_cuda.so, which not every torch has; the second is
// new in torch 2.13 and gives the message of the calling thread's last error.
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret);
const char* torch_exception_get_what_without_backtrace();

}  // extern "C"
