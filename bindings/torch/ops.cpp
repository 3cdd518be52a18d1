// The torch operators of namespace `gatedelta`: schemas and boxed kernels over the C ABI, through torch's stable C
// shim. One binary serves torch 2.10 and newer, of any build. The kernels read tensors, allocate outputs and workspace,
// and lend torch's threads or its current stream; what a call may look like is checked by the library itself.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "gatedelta/gatedelta.h"
#include "shim.h"

namespace {

constexpr uint64_t kOldestTorch = (uint64_t{2} << 56) | (uint64_t{10} << 48);  // 2.10.0, as the shim encodes versions

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error("gatedelta: " + message); }

void check_torch(AOTITorchError error, const char* call) {
  if (error != 0) fail(std::string("torch failed in ") + call);
}
#define GD_TORCH(call) check_torch(call, #call)

void check(gd_status status) {
  if (status != GD_OK) fail(gd_last_error());
}

// torch's numbers of dtypes and devices: asked for once, when this library is loaded.
const struct {
  int32_t f32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16();
  int32_t i64 = aoti_torch_dtype_int64(), i32 = aoti_torch_dtype_int32(), u8 = aoti_torch_dtype_uint8();
  int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
} codes;

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

StableIValue returned(Tensor tensor) { return reinterpret_cast<StableIValue>(tensor.release()); }

// ---- tensors -------------------------------------------------------------------------------------------------------

int32_t gd_dtype_of(const Tensor& tensor, const char* name) {
  const int32_t dtype = tensor.dtype();
  if (dtype == codes.f32) return GD_F32;
  if (dtype == codes.bf16) return GD_BF16;
  if (dtype == codes.f16) return GD_F16;
  if (dtype == codes.i64) return GD_I64;
  if (dtype == codes.i32) return GD_I32;
  fail(std::string(name) + " has a dtype that is none of float32, bfloat16, float16, int64 and int32");
}

// Device every tensor of a call must be on, and the place new ones go.
struct Device {
  int32_t type, index;

  explicit Device(const Tensor& q) : type(q.device_type()), index(q.device_index()) {
    if (type != codes.cpu && !is_cuda()) fail("q is neither on the CPU nor on a CUDA device");
  }
  bool is_cuda() const { return type == codes.cuda; }

  Tensor empty(int64_t rank, const int64_t* sizes, int32_t dtype) const {
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
  Tensor empty_bytes(size_t bytes) const {
    const int64_t size = static_cast<int64_t>(bytes);
    return empty(1, &size, codes.u8);
  }
  Tensor empty_like(const Tensor& other) const { return empty(other.rank(), other.sizes(), other.dtype()); }
  Tensor nothing() const { return empty_bytes(0); }  // an output that was not asked for

  void check(const Tensor& tensor, const char* name) const {
    if (tensor.device_type() != type || tensor.device_index() != index) {
      fail(std::string(name) + " is not on the device q is on");
    }
  }

  gd_tensor describe(const Tensor& tensor, const char* name) const {
    gd_tensor result{};
    const int64_t rank = tensor.rank();
    if (rank > GD_MAX_RANK)
      fail(std::string(name) + " has rank " + std::to_string(rank) + ", more than any tensor here");
    check(tensor, name);
    result.dtype = gd_dtype_of(tensor, name);
    result.rank = static_cast<int32_t>(rank);
    const int64_t* sizes = tensor.sizes();
    const int64_t* strides = tensor.strides();
    for (int64_t i = 0; i < rank; ++i) {
      result.shape[i] = sizes[i];
      result.stride[i] = strides[i];
    }
    return result;
  }
  // Takes the tensor as it is if its last `dims` dimensions are contiguous, as the kernels want them; otherwise it is
  // replaced by a copy.
  gd_tensor input(Tensor& tensor, const char* name, int32_t dims = 0) const {
    if (!tensor) return gd_tensor{};
    gd_tensor result = describe(tensor, name);
    if (!is_dense(result, dims)) {
      Tensor copy = empty_like(tensor);
      GD_TORCH(aoti_torch_copy_(copy.get(), tensor.get(), 0));
      tensor = std::move(copy);
      result = describe(tensor, name);
    }
    const void* data = nullptr;
    GD_TORCH(torch_get_const_data_ptr(tensor.get(), &data));
    result.data = const_cast<void*>(data);
    return result;
  }
  gd_tensor output(const Tensor& tensor, const char* name) const {
    if (!tensor) return gd_tensor{};
    gd_tensor result = describe(tensor, name);
    GD_TORCH(torch_get_mutable_data_ptr(tensor.get(), &result.data));
    return result;
  }

 private:
  static bool is_dense(const gd_tensor& tensor, int32_t dims) {
    int64_t stride = 1;
    for (int32_t i = tensor.rank - 1; i >= 0 && i >= tensor.rank - dims; --i) {
      if (tensor.stride[i] != stride && tensor.shape[i] != 1) return false;
      stride *= tensor.shape[i];
    }
    return true;
  }
};

// ---- where a call runs ---------------------------------------------------------------------------------------------

// GATEDELTA_ISA, read once when this library is loaded.
struct ForcedIsa {
  int32_t isa = GD_ISA_AUTO;
  std::string error;

  ForcedIsa() {
    const char* wanted = std::getenv("GATEDELTA_ISA");
    if (!wanted || !*wanted) return;
    std::string names;
    for (int32_t i = 0; i < GD_ISA_COUNT; ++i) {
      if (std::strcmp(gd_isa_name(i), wanted) == 0) {
        isa = i;
        return;
      }
      names += std::string(i ? ", " : "") + gd_isa_name(i);
    }
    error = std::string("GATEDELTA_ISA is '") + wanted + "', which is none of " + names;
  }
};
const ForcedIsa forced_isa;

// Torch's threads behind the library's parallel_for.
class TorchThreads {
 public:
  gd_exec exec() {
    if (!forced_isa.error.empty()) fail(forced_isa.error);
    uint32_t threads = 1;
    GD_TORCH(torch_get_num_threads(&threads));
    gd_exec exec{};
    exec.device = GD_CPU;
    exec.isa = forced_isa.isa;
    exec.num_threads = static_cast<int32_t>(threads);
    if (threads > 1) {
      exec.parallel_for = parallel_for;
      exec.parallel_for_context = this;
    }
    return exec;
  }
  // An exception must not cross the C ABI, so a failure of torch's is kept until the call is over.
  void check() const {
    if (failed_) fail("torch failed in torch_parallel_for");
  }

 private:
  static void parallel_for(void* context, int64_t count, gd_task_fn run, void* task) {
    struct Range {
      gd_task_fn run;
      void* task;
    } range{run, task};
    const AOTITorchError error = torch_parallel_for(
        0, count, 1,
        [](int64_t begin, int64_t end, void* data) {
          const Range& range = *static_cast<Range*>(data);
          for (int64_t i = begin; i < end; ++i) range.run(range.task, i);
        },
        &range);
    if (error != 0) static_cast<TorchThreads*>(context)->failed_ = true;
  }

  bool failed_ = false;
};

// torch's current stream. Where there are CUDA tensors, libtorch_cuda.so is loaded, but perhaps not for all to see.
void* current_stream(int32_t device_index) {
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<decltype(&aoti_torch_get_current_cuda_stream)>(
        dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  }();
  if (!get) fail("this torch does not say what its current CUDA stream is");
  void* stream = nullptr;
  GD_TORCH(get(device_index, &stream));
  return stream;
}

gd_exec cuda_exec(const Device& device) {
  gd_exec exec{};
  exec.device = GD_CUDA;
  exec.device_index = device.index;
  exec.stream = current_stream(device.index);
  return exec;
}

template <typename Args>
Args new_args() {
  Args args{};
  args.struct_size = sizeof args;
  return args;
}

// Asks for the workspace, allocates it, runs. `workspace` and `run` are a pair of functions of the C ABI. On CUDA the
// kernels may still run when the workspace is freed: torch gives it to nothing but later work of the same stream.
template <typename Args>
void run_with_workspace(Args& args, const Device& device, gd_status (*workspace)(const Args*, size_t*),
                        gd_status (*run)(const Args*)) {
  TorchThreads threads;
  args.exec = device.is_cuda() ? cuda_exec(device) : threads.exec();
  check(workspace(&args, &args.exec.workspace_bytes));
  const Tensor memory = device.empty_bytes(args.exec.workspace_bytes);
  GD_TORCH(torch_get_mutable_data_ptr(memory.get(), &args.exec.workspace));
  check(run(&args));
  threads.check();
}

// ---- what all operators share --------------------------------------------------------------------------------------

// `none` is "=None" where nothing else follows: an argument left out takes torch less time than a None.
#define GD_INPUT_SCHEMA(none)                                                                          \
  "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int options, Tensor? cu_seqlens" none          \
  ", Tensor? initial_state" none ", float? scale" none ", Tensor? A_log" none ", Tensor? dt_bias" none \
  ", Tensor? initial_indices" none

// What `options` consists of, as in _ops.py. One argument, because torch takes its time for each.
enum Option : int64_t {
  kGateRaw = 1 << 0,
  kBetaLogit = 1 << 1,
  kBetaLogitDoubled = 1 << 2,
  kStateValueFirst = 1 << 3,
  kL2norm = 1 << 4,
  kFinalState = 1 << 5,  // is to be returned
  kUncut = 1 << 6,       // GD_CP_OFF
  kBatchInvariant = 1 << 7,
  kSmallWorkspace = 1 << 8,  // of a backward
  kInputOptions = kFinalState - 1,
  kSchedule = kUncut | kBatchInvariant,
};

struct Inputs {
  Tensor q, k, v, g, beta;
  int64_t options;
  Tensor cu_seqlens, initial_state;
  std::optional<double> scale;
  Tensor A_log, dt_bias, initial_indices;

  explicit Inputs(Arguments& from)
      : q(from.tensor()),
        k(from.tensor()),
        v(from.tensor()),
        g(from.tensor()),
        beta(from.tensor()),
        options(from.integer()),
        cu_seqlens(from.optional_tensor()),
        initial_state(from.optional_tensor()),
        scale(from.optional_float()),
        A_log(from.optional_tensor()),
        dt_bias(from.optional_tensor()),
        initial_indices(from.optional_tensor()) {}

  bool has(Option option) const { return (options & option) != 0; }

  // `also` is what this operator's options may be beyond those of the inputs. With `in_place` the states are read from
  // there.
  gd_inputs describe(const Device& device, int64_t also, const Tensor* in_place = nullptr) {
    if (const int64_t taken = kInputOptions | also; options & ~taken)
      fail("options is " + std::to_string(options) + ", but this operator takes bits of " + std::to_string(taken));
    gd_inputs in{};
    // Rows with gaps inside and scattered index arrays are copied; a pool of states never is (the library refuses it).
    in.q = device.input(q, "q", 1);
    in.k = device.input(k, "k", 1);
    in.v = device.input(v, "v", 1);
    in.g = device.input(g, "g");
    in.beta = device.input(beta, "beta");
    in.A_log = device.input(A_log, "A_log");
    in.dt_bias = device.input(dt_bias, "dt_bias");
    in.cu_seqlens = device.input(cu_seqlens, "cu_seqlens", 1);
    in.initial_state = in_place ? device.output(*in_place, "initial_state")
                                : device.input(initial_state, "initial_state", initial_indices ? 0 : 2);
    in.initial_indices = device.input(initial_indices, "initial_state_indices", 1);
    in.gate = has(kGateRaw) ? GD_GATE_RAW : GD_GATE_LOG;
    in.beta_kind = has(kBetaLogitDoubled) ? GD_BETA_LOGIT_DOUBLED : has(kBetaLogit) ? GD_BETA_LOGIT : GD_BETA_VALUE;
    in.state_layout = has(kStateValueFirst) ? GD_STATE_VK : GD_STATE_KV;
    in.l2norm = has(kL2norm);
    in.has_scale = scale.has_value();
    in.scale = static_cast<float>(scale.value_or(0));
    return in;
  }
  template <typename Args>
  void schedule(Args& args) const {
    args.context_parallel = has(kUncut) ? GD_CP_OFF : GD_CP_AUTO;
    args.batch_invariant = has(kBatchInvariant);
  }

  // Shape [B, T, Hv, V] of o, after describe() has seen no rank above GD_MAX_RANK.
  Tensor empty_o(const Device& device) const {
    if (v.rank() != 4) fail("v must have rank 4, not " + std::to_string(v.rank()));
    return device.empty(4, v.sizes(), q.dtype());
  }
  // [N, Hv, K, V] or [N, Hv, V, K] in float32, if it is to be returned.
  Tensor empty_final_state(const Device& device) const {
    if (!has(kFinalState)) return device.nothing();
    if (q.rank() != 4) fail("q must have rank 4, not " + std::to_string(q.rank()));
    const int64_t key_dim = q.sizes()[3], value_dim = v.sizes()[3];
    const bool value_first = has(kStateValueFirst);
    const int64_t sizes[] = {sequence_count(), v.sizes()[2], value_first ? value_dim : key_dim,
                             value_first ? key_dim : value_dim};
    return device.empty(4, sizes, codes.f32);
  }

 private:
  int64_t sequence_count() const {
    if (!cu_seqlens) return q.rank() > 0 ? q.sizes()[0] : 0;
    const int64_t offsets = cu_seqlens.rank() == 1 ? cu_seqlens.sizes()[0] : 0;
    if (offsets < 1) fail("cu_seqlens must have rank 1 and at least one entry");
    return offsets - 1;
  }
};

// ---- operators -----------------------------------------------------------------------------------------------------

constexpr char kChunkFwd[] = "chunk_fwd(" GD_INPUT_SCHEMA("=None") ") -> (Tensor o, Tensor final_state)";
constexpr char kChunkFwdSave[] =
    "chunk_fwd_save(" GD_INPUT_SCHEMA("=None") ") -> (Tensor o, Tensor final_state, Tensor saved)";

void chunk_fwd(StableIValue* stack, uint64_t, uint64_t outputs) {
  Arguments from(stack);
  Inputs inputs(from);
  const bool save = outputs == 3;

  auto args = new_args<gd_forward_args>();
  const Device device(inputs.q);
  args.in = inputs.describe(device, kFinalState | kSchedule);
  inputs.schedule(args);
  Tensor o = inputs.empty_o(device), saved;
  args.o = device.output(o, "o");
  Tensor final_state = inputs.empty_final_state(device);
  if (inputs.has(kFinalState)) args.final_state = device.output(final_state, "final_state");
  if (save) {
    args.exec.device = device.is_cuda() ? GD_CUDA : GD_CPU;  // which decides what is kept
    check(gd_forward_saved_size(&args, &args.saved_bytes));
    saved = device.empty_bytes(args.saved_bytes);
    if (args.saved_bytes > 0) GD_TORCH(torch_get_mutable_data_ptr(saved.get(), &args.saved));
  }
  run_with_workspace(args, device, gd_forward_workspace, gd_forward);
  stack[0] = returned(std::move(o));
  stack[1] = returned(std::move(final_state));
  if (save) stack[2] = returned(std::move(saved));
}

// in_place: final_state is also what the sequences start from, and initial_state is absent.
constexpr char kChunkFwdOut[] = "chunk_fwd_out(" GD_INPUT_SCHEMA("")
                                ", Tensor(a!) o, Tensor(b!)? final_state, Tensor? final_indices, bool in_place, "
                                "Tensor(c!)? checkpoints, Tensor? checkpoint_indices, int checkpoint_every) -> ()";

void check_in_place(bool in_place, const Inputs& inputs, const Tensor& final_state) {
  if (in_place && (inputs.initial_state || !final_state)) {
    fail("in_place takes the states from final_state: give that one and no initial_state");
  }
}

void chunk_fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);
  const Tensor o = from.tensor();
  const Tensor final_state = from.optional_tensor();
  Tensor final_indices = from.optional_tensor();
  const bool in_place = from.boolean();
  const Tensor checkpoints = from.optional_tensor();
  Tensor checkpoint_indices = from.optional_tensor();

  auto args = new_args<gd_forward_args>();
  args.checkpoint_every = from.integer();

  const Device device(inputs.q);
  check_in_place(in_place, inputs, final_state);
  args.in = inputs.describe(device, kSchedule, in_place ? &final_state : nullptr);
  inputs.schedule(args);
  args.o = device.output(o, "out");
  args.final_state = device.output(final_state, "final_state");
  args.final_indices = device.input(final_indices, "final_state_indices", 1);
  args.checkpoints = device.output(checkpoints, "checkpoints");
  args.checkpoint_indices = device.input(checkpoint_indices, "checkpoint_indices", 1);
  run_with_workspace(args, device, gd_forward_workspace, gd_forward);
}

// wanted: bit i set = the i-th result is computed; the others come back empty.
constexpr char kChunkBwd[] = "chunk_bwd(" GD_INPUT_SCHEMA("")
                             ", Tensor d_o, Tensor? d_final_state, Tensor? saved, int wanted) -> (Tensor dq, "
                             "Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor d_dt_bias, "
                             "Tensor d_initial_state)";

void chunk_bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);
  Tensor d_o = from.tensor();
  Tensor d_final_state = from.optional_tensor();
  const Tensor saved = from.optional_tensor();
  const int64_t wanted = from.integer();

  auto args = new_args<gd_backward_args>();
  const Device device(inputs.q);
  args.in = inputs.describe(device, kSchedule | kSmallWorkspace);
  inputs.schedule(args);
  args.small_workspace = inputs.has(kSmallWorkspace);
  args.d_o = device.input(d_o, "do", 1);
  args.d_final_state = device.input(d_final_state, "dht", 2);
  if (saved) {
    device.check(saved, "saved");
    if (saved.dtype() != codes.u8 || saved.rank() != 1) fail("saved is not what a forward returned");
    args.saved_bytes = static_cast<size_t>(saved.sizes()[0]);
    if (args.saved_bytes > 0) GD_TORCH(torch_get_const_data_ptr(saved.get(), &args.saved));
  }

  struct Gradient {
    const Tensor& of;
    gd_tensor& place;
    const char* name;
  };
  const Gradient gradients[] = {
      {inputs.q, args.dq, "q"},
      {inputs.k, args.dk, "k"},
      {inputs.v, args.dv, "v"},
      {inputs.g, args.dg, "g"},
      {inputs.beta, args.dbeta, "beta"},
      {inputs.A_log, args.dA_log, "A_log"},
      {inputs.dt_bias, args.d_dt_bias, "dt_bias"},
      {inputs.initial_state, args.d_initial_state, "initial_state"},
  };
  Tensor results[std::size(gradients)];
  for (size_t i = 0; i < std::size(gradients); ++i) {
    const auto& [of, place, name] = gradients[i];
    if (!(wanted >> i & 1)) {
      results[i] = device.nothing();
      continue;
    }
    if (!of) fail(std::string("the gradient of ") + name + " is wanted, but there is no " + name);
    if (&of == &inputs.initial_state && inputs.initial_indices) {
      fail("there is no gradient of a pool of initial states: give the states of this call's sequences instead");
    }
    results[i] = device.empty_like(of);
    place = device.output(results[i], name);
  }
  run_with_workspace(args, device, gd_backward_workspace, gd_backward);
  for (size_t i = 0; i < std::size(gradients); ++i) stack[i] = returned(std::move(results[i]));
}

constexpr char kRecurrent[] = "recurrent(" GD_INPUT_SCHEMA("=None") ") -> (Tensor o, Tensor final_state)";

void recurrent(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);

  auto args = new_args<gd_recurrent_args>();
  const Device device(inputs.q);
  args.in = inputs.describe(device, kFinalState);
  Tensor o = inputs.empty_o(device);
  args.o = device.output(o, "o");
  Tensor final_state = inputs.empty_final_state(device);
  if (inputs.has(kFinalState)) args.final_state = device.output(final_state, "final_state");
  run_with_workspace(args, device, gd_recurrent_workspace, gd_recurrent);
  stack[0] = returned(std::move(o));
  stack[1] = returned(std::move(final_state));
}

constexpr char kRecurrentOut[] = "recurrent_out(" GD_INPUT_SCHEMA("")
                                 ", Tensor(a!)? o, Tensor(b!)? final_state, Tensor? final_indices, bool in_place, "
                                 "Tensor? accept_lengths, Tensor(c!)? step_states, Tensor? step_indices) -> ()";

void recurrent_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);
  const Tensor o = from.optional_tensor();
  const Tensor final_state = from.optional_tensor();
  Tensor final_indices = from.optional_tensor();
  const bool in_place = from.boolean();
  Tensor accept_lengths = from.optional_tensor();
  const Tensor step_states = from.optional_tensor();
  Tensor step_indices = from.optional_tensor();

  auto args = new_args<gd_recurrent_args>();
  const Device device(inputs.q);
  check_in_place(in_place, inputs, final_state);
  args.in = inputs.describe(device, 0, in_place ? &final_state : nullptr);
  args.o = device.output(o, "out");
  args.final_state = device.output(final_state, "final_state");
  args.final_indices = device.input(final_indices, "final_state_indices", 1);
  args.accept_lengths = device.input(accept_lengths, "accept_lengths", 1);
  args.step_states = device.output(step_states, "step_states");
  args.step_indices = device.input(step_indices, "step_indices", 2);
  run_with_workspace(args, device, gd_recurrent_workspace, gd_recurrent);
}

// ---- registration --------------------------------------------------------------------------------------------------

struct Operator {
  const char* schema;
  void (*kernel)(StableIValue*, uint64_t, uint64_t);

  std::string name() const { return std::string(schema, std::strchr(schema, '(')); }
};
constexpr Operator kOperators[] = {
    {kChunkFwd, chunk_fwd}, {kChunkFwdSave, chunk_fwd}, {kChunkFwdOut, chunk_fwd_out},
    {kChunkBwd, chunk_bwd}, {kRecurrent, recurrent},    {kRecurrentOut, recurrent_out},
};

// The same kernels for both: the library knows which devices have which operation, and says so.
constexpr const char* kDispatchKeys[] = {"CPU", "CUDA"};

// The library objects live as long as the process: deleting one would take its operators away. A failure ends the
// registration (torch has written the reason to stderr) and shows as missing operators: nothing may be thrown while the
// library is being loaded.
bool register_operators() {
  constexpr char kFile[] = "bindings/torch/ops.cpp";
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_def("gatedelta", kFile, __LINE__, &library) != 0) return false;
  for (const Operator& op : kOperators) {
    if (aoti_torch_library_def(library, op.schema) != 0) return false;
  }
  for (const char* key : kDispatchKeys) {
    if (aoti_torch_library_init_impl("gatedelta", key, kFile, __LINE__, &library) != 0) return false;
    for (const Operator& op : kOperators) {
      if (torch_library_impl(library, op.name().c_str(), op.kernel, kOldestTorch) != 0) return false;
    }
  }
  return true;
}
[[maybe_unused]] const bool registered = register_operators();

}  // namespace
