// A recurrent step straight from Python objects, past torch's dispatcher: decode is a call per layer and token, and the
// dispatcher takes longer than the step. It takes plain calls only: strided torch tensors on one device, nothing to
// differentiate, and no mode, transform or profiler that works on the operator. For any other call, and for one the
// library refuses, it returns None; the caller then takes the operator, which can do them all and has the messages.
#include <exception>

#include "python_shim.h"
#include "run.hpp"

namespace gatedelta::binding {

namespace {

// Structs of object pointers stand for Python's argument arrays.
template <class Fields>
constexpr size_t kFields = sizeof(Fields) / sizeof(void*);

// What Python passes once, in this order (gatedelta/torch/_direct.py).
struct Helpers {
  PyObject *none, *yes, *no, *zero;
  PyObject *float_type, *int_type, *tensor_type, *parameter_type, *runtime_error;
  PyObject *empty_like, *increment_version, *is_neg, *requires_grad;
  PyObject *forward_ad, *current_level;  // a module's dict, and the key of the depth there
  PyObject* dispatch_modes;              // functions: how many are active, is one active, which one is
  PyObject *function_modes, *transforms, *profiler, *tracer;
  PyObject *grouped, *tiled;  // strings, which Python keeps once
};
Helpers helpers;
const DLPackExchangeAPI* dlpack = nullptr;

// An owned reference, or null.
class Object {
 public:
  explicit Object(PyObject* object = nullptr) : object_(object) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() {
    if (object_) Py_DecRef(object_);
  }
  bool is(const PyObject* other) const { return object_ == other; }
  PyObject* get() const { return object_; }
  void reset(PyObject* object) {
    if (object_) Py_DecRef(object_);
    object_ = object;
  }

 private:
  PyObject* object_;
};

bool torch_is_plain() {
  PyObject* const depth = PyDict_GetItem(helpers.forward_ad, helpers.current_level);
  if (!depth || PyLong_AsLong(depth) >= 0) return false;
  for (PyObject* active : {helpers.function_modes, helpers.transforms, helpers.profiler})
    if (!Object(PyObject_CallNoArgs(active)).is(helpers.no)) return false;
  return Object(PyObject_CallNoArgs(helpers.dispatch_modes)).is(helpers.zero) &&
         Object(PyObject_CallNoArgs(helpers.tracer)).is(helpers.none);
}

bool requires_grad(PyObject* tensor) { return !Object(PyObject_GetAttr(tensor, helpers.requires_grad)).is(helpers.no); }

int32_t gd_dtype_of(const DLDataType& dtype) {
  switch (dtype.code << 8 | dtype.bits) {
    case kDLFloat << 8 | 32: return GD_F32;
    case kDLFloat << 8 | 16: return GD_F16;
    case kDLBfloat << 8 | 16: return GD_BF16;
    case kDLInt << 8 | 32: return GD_I32;
    case kDLInt << 8 | 64: return GD_I64;
    default: return GD_DTYPE_NONE;
  }
}

constexpr int64_t kMaxSlots = int64_t{1} << 44;  // as Python has it

// The arguments of fused_recurrent_gated_delta_rule, in its order.
struct Given {
  PyObject *q, *k, *v, *g, *gk, *gv, *beta, *scale, *initial_state, *output_final_state, *l2norm, *raw_gate, *A_log,
      *dt_bias, *beta_sigmoid, *neg_eigval, *state_v_first, *cu_seqlens, *transpose_state_layout, *output_o, *out,
      *initial_state_indices, *final_state, *final_state_indices, *accept_lengths, *step_states, *step_indices,
      *previous_accept_lengths, *null_index, *batch_invariant, *key_head_order;
};

// Python's error is set.
struct PythonError {};

class Step {
 public:
  explicit Step(const Given& from) : from_(from) { args_.struct_size = sizeof args_; }

  // False: this is not a plain call, or not a valid one; nothing was written.
  bool run() {
    if (!read_options() || !read_inputs() || !read_outputs() || !call()) return false;
    mark_written();
    return true;
  }

  PyObject* result() const {
    return PyTuple_Pack(2, given(from_.output_o) ? o_.get() : helpers.none, state_.get() ? state_.get() : helpers.none);
  }

 private:
  bool given(PyObject* flag) const { return flag == helpers.yes; }
  bool absent(PyObject* object) const { return object == helpers.none; }

  bool read_options() {
    for (PyObject* flag : {from_.output_final_state, from_.l2norm, from_.raw_gate, from_.beta_sigmoid, from_.neg_eigval,
                           from_.state_v_first, from_.output_o, from_.batch_invariant})
      if (flag != helpers.yes && flag != helpers.no) return false;
    if (from_.key_head_order != helpers.grouped && from_.key_head_order != helpers.tiled) return false;
    if (!absent(from_.gk) || !absent(from_.gv) || !absent(from_.transpose_state_layout)) return false;
    if (given(from_.neg_eigval) && !given(from_.beta_sigmoid)) return false;
    if (!given(from_.output_o) && !absent(from_.out)) return false;
    args_.batch_invariant = given(from_.batch_invariant);
    gd_inputs& in = args_.in;
    in.gate = given(from_.raw_gate) ? GD_GATE_RAW : GD_GATE_LOG;
    in.beta_kind = given(from_.neg_eigval)     ? GD_BETA_LOGIT_DOUBLED
                   : given(from_.beta_sigmoid) ? GD_BETA_LOGIT
                                               : GD_BETA_VALUE;
    in.state_layout = given(from_.state_v_first) ? GD_STATE_VK : GD_STATE_KV;
    in.l2norm = given(from_.l2norm);
    in.key_head_order = from_.key_head_order == helpers.tiled ? GD_KEY_HEADS_TILED : GD_KEY_HEADS_GROUPED;
    if (!Object(PyObject_Type(from_.null_index)).is(helpers.int_type)) return false;
    const int64_t null_index = PyLong_AsLong(from_.null_index);
    if (null_index < -1 || null_index >= kMaxSlots || PyErr_Occurred()) return false;
    in.first_slot = null_index + 1;
    if (absent(from_.scale)) return true;
    if (!Object(PyObject_Type(from_.scale)).is(helpers.float_type)) return false;
    in.has_scale = 1;
    in.scale = static_cast<float>(PyFloat_AsDouble(from_.scale));
    return true;
  }

  bool read_inputs() {
    gd_inputs& in = args_.in;
    const bool in_place = !absent(from_.final_state) && from_.final_state == from_.initial_state;
    // q comes first: the others must be on its device.
    if (absent(from_.q) || absent(from_.k) || absent(from_.v) || absent(from_.g) || absent(from_.beta)) return false;
    if (!read(from_.q, in.q) || !is_dense(in.q, 1) || !read(from_.k, in.k) || !is_dense(in.k, 1) ||
        !read(from_.v, in.v) || !is_dense(in.v, 1) || !read(from_.g, in.g) || !read(from_.beta, in.beta) ||
        !read(from_.A_log, in.A_log) || !read(from_.dt_bias, in.dt_bias) || !read(from_.cu_seqlens, in.cu_seqlens) ||
        !is_dense(in.cu_seqlens, 1) || !read(from_.initial_state_indices, in.initial_state_indices) ||
        !read(from_.initial_state, in.initial_state) ||
        (absent(from_.initial_state_indices) && !in_place && !is_dense(in.initial_state, 2)))
      return false;
    if (!aoti_torch_grad_mode_is_enabled()) return true;
    for (PyObject* input :
         {from_.q, from_.k, from_.v, from_.g, from_.beta, from_.A_log, from_.dt_bias, from_.initial_state})
      if (!absent(input) && requires_grad(input)) return false;
    return true;
  }

  bool read_outputs() {
    for (PyObject* written : {from_.out, from_.final_state, from_.step_states})
      if (!absent(written) && requires_grad(written)) return false;
    if (!read(from_.final_state_indices, args_.final_state_indices) ||
        !read(from_.accept_lengths, args_.accept_lengths) || !read(from_.step_states, args_.step_states) ||
        !read(from_.step_indices, args_.step_indices) ||
        !read(from_.previous_accept_lengths, args_.previous_accept_lengths))
      return false;
    if (given(from_.output_o) && !output(o_, from_.out, from_.v, args_.in.v, args_.out)) return false;
    if (!absent(from_.final_state) || given(from_.output_final_state)) {
      // A new state is float32, and its shape is that of the initial states, if there is one for each sequence.
      const bool alike = args_.in.initial_state.dtype == GD_F32 && absent(from_.initial_state_indices);
      if (absent(from_.final_state) && (!alike || !absent(from_.final_state_indices))) return false;
      return output(state_, from_.final_state, from_.initial_state, args_.in.initial_state, args_.final_state);
    }
    return absent(from_.final_state_indices);
  }

  // The caller's buffer, or a new contiguous tensor like another.
  bool output(Object& place, PyObject* buffer, PyObject* like, const gd_tensor& like_shape, gd_tensor& tensor) {
    if (!absent(buffer)) {
      Py_IncRef(buffer);
      place.reset(buffer);
    } else {
      // Where nothing was permuted, empty_like makes a contiguous tensor.
      for (int i = 1; i < like_shape.rank; ++i)
        if (like_shape.stride[i - 1] < like_shape.stride[i] && like_shape.shape[i - 1] > 1 && like_shape.shape[i] > 1)
          return false;
      place.reset(PyObject_CallFunctionObjArgs(helpers.empty_like, like, nullptr));
      if (!place.get()) return false;
    }
    return read(place.get(), tensor);
  }

  bool read(PyObject* object, gd_tensor& tensor) {
    if (absent(object)) return true;
    if (const Object type(PyObject_Type(object)); !type.is(helpers.tensor_type) && !type.is(helpers.parameter_type))
      return false;
    DLTensor from;
    if (dlpack->dltensor_from_py_object_no_sync(object, &from) != 0 || from.ndim > GD_MAX_RANK) return false;
    tensor.dtype = gd_dtype_of(from.dtype);
    if (tensor.dtype == GD_DTYPE_NONE) return false;
    if (object == from_.q) {
      if (from.device.type != kDLCPU && from.device.type != kDLCUDA) return false;
      device_ = from.device;
    } else if (from.device.type != device_.type || from.device.index != device_.index) {
      return false;
    }
    tensor.data = static_cast<char*>(from.data) + from.byte_offset;
    tensor.rank = from.ndim;
    for (int i = 0; i < from.ndim; ++i) {
      tensor.shape[i] = from.shape[i];
      tensor.stride[i] = from.strides[i];
    }
    return !is_negated(object, tensor);
  }

  // Where torch only marked a tensor as negated, the dispatcher gives an operator a copy. It does so to imaginary
  // parts, whose elements lie two apart: for most tensors the flag need not be read.
  static bool is_negated(PyObject* object, const gd_tensor& tensor) {
    if (tensor.dtype == GD_I32 || tensor.dtype == GD_I64) return false;
    const int last = tensor.rank - 1;
    if (last >= 0 && tensor.shape[last] > 1 && tensor.stride[last] == 1) return false;
    return !Object(PyObject_CallFunctionObjArgs(helpers.is_neg, object, nullptr)).is(helpers.no);
  }

  bool call() {
    TorchThreads threads;
    args_.exec = device_.type == kDLCUDA ? cuda_exec(device_.index) : threads.exec();
    PyThreadState* const thread = PyEval_SaveThread();
    const gd_status status = run_step(args_);
    PyEval_RestoreThread(thread);
    threads.check();
    if (status == GD_INTERNAL) check(status);  // it may have written: the operator must not run after it
    return status == GD_OK;
  }

  // So that a graph that saved one of these for its backward refuses to use the new contents.
  void mark_written() const {
    PyObject* written[3];
    int count = 0;
    for (PyObject* buffer : {from_.out, from_.final_state, from_.step_states})
      if (!absent(buffer)) written[count++] = buffer;
    if (count == 0) return;
    const Object tuple(count == 1   ? PyTuple_Pack(1, written[0])
                       : count == 2 ? PyTuple_Pack(2, written[0], written[1])
                                    : PyTuple_Pack(3, written[0], written[1], written[2]));
    if (!Object(PyObject_CallFunctionObjArgs(helpers.increment_version, tuple.get(), nullptr)).get())
      throw PythonError();
  }

  const Given& from_;
  gd_recurrent_args args_{};
  DLDevice device_{};
  Object o_, state_;
};

PyObject* recurrent(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  try {
    if (count == kFields<Given> && torch_is_plain()) {
      Given from;
      std::memcpy(&from, arguments, sizeof from);
      if (Step step(from); step.run()) return step.result();
    }
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(helpers.runtime_error, error.what());
    return nullptr;
  }
  PyErr_Clear();
  Py_IncRef(helpers.none);
  return helpers.none;
}

}  // namespace

}  // namespace gatedelta::binding

// Makes `recurrent` a function of Python's. Null, without an error of Python's: this torch gives another DLPack table.
extern "C" [[gnu::visibility("default")]] PyObject* gatedelta_make_direct_recurrent(PyObject* exchange_api,
                                                                                    PyObject* tuple) {
  using namespace gatedelta::binding;
  static PyMethodDef method = {"recurrent", recurrent, METH_FASTCALL, nullptr};
  dlpack = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(exchange_api, "dlpack_exchange_api"));
  if (!dlpack || dlpack->major != 1 || !dlpack->dltensor_from_py_object_no_sync) return nullptr;
  PyObject* objects[kFields<Helpers>];
  std::ptrdiff_t i = 0;
  for (PyObject*& object : objects) {
    object = PyTuple_GetItem(tuple, i++);
    if (!object) return nullptr;
    Py_IncRef(object);
  }
  std::memcpy(&helpers, objects, sizeof helpers);
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}
