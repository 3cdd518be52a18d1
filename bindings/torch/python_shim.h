// Declarations of the Python functions and the DLPack table that direct.cpp uses: a part of Python's stable ABI (3.10),
// and DLPack 1's exchange table, which torch.Tensor gives since torch 2.10. Declared here so that building needs
// neither of them. The functions are weak: a process without Python can load this library, too.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct PyObject;  // opaque
struct PyThreadState;
using PyFastFunction = PyObject* (*)(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count);
struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* documentation;
};
constexpr int METH_FASTCALL = 0x80;

[[gnu::weak]] void Py_IncRef(PyObject* object);
[[gnu::weak]] void Py_DecRef(PyObject* object);
[[gnu::weak]] PyObject* PyCFunction_NewEx(PyMethodDef* method, PyObject* self, PyObject* module);
[[gnu::weak]] void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
[[gnu::weak]] void PyErr_Clear();
[[gnu::weak]] PyObject* PyErr_Occurred();  // borrowed
[[gnu::weak]] void PyErr_SetString(PyObject* type, const char* message);
[[gnu::weak]] PyThreadState* PyEval_SaveThread();
[[gnu::weak]] void PyEval_RestoreThread(PyThreadState* state);
[[gnu::weak]] PyObject* PyDict_GetItem(PyObject* dict, PyObject* key);  // borrowed
[[gnu::weak]] double PyFloat_AsDouble(PyObject* object);
[[gnu::weak]] long PyLong_AsLong(PyObject* object);  // NOLINT(google-runtime-int): Python's own type
[[gnu::weak]] PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
[[gnu::weak]] PyObject* PyObject_CallNoArgs(PyObject* callable);
[[gnu::weak]] PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
[[gnu::weak]] PyObject* PyObject_Type(PyObject* object);
[[gnu::weak]] PyObject* PyTuple_GetItem(PyObject* tuple, std::ptrdiff_t index);  // borrowed
[[gnu::weak]] PyObject* PyTuple_Pack(std::ptrdiff_t count, ...);

struct DLDevice {
  int32_t type, index;
};
constexpr int32_t kDLCPU = 1, kDLCUDA = 2;
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
constexpr uint8_t kDLInt = 0, kDLFloat = 2, kDLBfloat = 4;
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  uint32_t major, minor;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* result);  // may be null
  int (*current_work_stream)(int32_t device_type, int32_t device_index, void** stream);
};

}  // extern "C"
