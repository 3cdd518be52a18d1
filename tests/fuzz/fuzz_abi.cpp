// Decodes bytes into a call of one entry point, on buffers of exactly the size the arguments claim, and makes it.
// Whatever the bytes say: nothing outside the buffers is touched (AddressSanitizer sees), a refused call leaves every
// buffer but the workspace as it was, and an accepted one fills its outputs with finite numbers and leaves their gaps.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <vector>

#include "gatedelta/gatedelta.hpp"

// For the replay to see that most of what the decoder makes is not refused.
size_t accepted_calls = 0;

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s (last error: %s)\n", what, gd_last_error());
  std::abort();
}

// The input, and after its end a pseudo-random continuation: short inputs, with which a fuzzer begins, already reach
// everything.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), end_(data + size) {
    for (const uint8_t* byte = data_; byte != end_; ++byte) random_ = (random_ ^ *byte) * 0x100000001b3u;
  }
  uint8_t next() {
    if (data_ != end_) return *data_++;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint8_t>(random_ >> 56);
  }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[next() % choices.size()];
  }
  bool sometimes() { return next() % 4 == 3; }
  bool rarely() { return next() % 64 == 63; }

 private:
  const uint8_t *data_, *end_;
  uint64_t random_ = 0xcbf29ce484222325u;
};

enum class Kind { input, key, gate, output };

size_t bytes_of(int32_t dtype) { return dtype == GD_I64 ? 8 : dtype == GD_BF16 || dtype == GD_F16 ? 2 : 4; }

// Numbers every float type holds exactly, as bits of each. Keys are short enough (|k| <= 1) for no state to grow.
struct Number {
  float f32;
  uint16_t bf16, f16;
};
constexpr Number kNumbers[] = {{0.0f, 0, 0}, {0.5f, 0x3f00, 0x3800}, {-1.0f, 0xbf80, 0xbc00}, {0.25f, 0x3e80, 0x3400}};
constexpr Number kKeys[] = {{0.0625f, 0x3d80, 0x2c00}, {-0.03125f, 0xbd00, 0xa800}};
constexpr Number kGates[] = {{0.0f, 0, 0},
                             {-0.5f, 0xbf00, 0xb800},
                             {-8.0f, 0xc100, 0xc800},
                             {-std::numeric_limits<float>::infinity(), 0xff80, 0xfc00}};

class Caller {
 public:
  explicit Caller(Bytes bytes) : bytes_(bytes) {}
  void run() {
    B_ = bytes_.pick<int64_t>({1, 2, 3, 0});
    T_ = bytes_.pick<int64_t>({1, 2, 5, 64, 65, 130, 17, 0});
    Hk_ = bytes_.pick<int64_t>({1, 2});
    Hv_ = Hk_ * bytes_.pick<int64_t>({1, 2, 3});
    K_ = bytes_.pick<int64_t>({16, 32, 48, 80});
    V_ = bytes_.pick<int64_t>({16, 32, 48, 144});
    float_ = bytes_.pick<int32_t>({GD_F32, GD_BF16, GD_F16});
    switch (bytes_.next() % 11) {
      case 0: return forward();
      case 1: return backward();
      case 2: return gated_norm();
      case 3: return gated_norm_backward();
      case 4: return conv1d();
      case 5: return conv1d_backward();
      case 6: return layer_step();
      case 7: return summary();
      case 8: return backward_summary();
      case 9: return merge();
      default: return recurrent();
    }
  }

 private:
  struct Block {
    gatedelta::Workspace memory;
    size_t size = 0;
    std::vector<char> before;
    bool scratch = false;
  };

  void forward() {
    gatedelta::ForwardArgs args;
    common(args);
    args.out = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    final_states(args);
    if (bytes_.sometimes()) {
      const bool at_offsets = bytes_.sometimes();
      args.checkpoint_every = at_offsets && !bytes_.rarely() ? 0 : bytes_.pick<int64_t>({64, 128, 1, 0});
      if (at_offsets) args.checkpoint_offsets = chunk_offsets();
      if (bytes_.sometimes()) {
        args.checkpoints = args.final_state;
      } else {
        args.checkpoints = state(at_offsets ? sequences_ : bytes_.pick<int64_t>({6, 1, 3}), Kind::output);
      }
      if (bytes_.sometimes())
        args.checkpoint_indices = slots({at_offsets ? sequences_ : bytes_.pick<int64_t>({6, 1, 3})});
    }
    args.context_parallel = bytes_.rarely() ? bytes_.next() - 1 : 0;
    size_t saved = 0;
    if (bytes_.sometimes() && gd_forward_saved_size(&args, &saved) == GD_OK) {
      args.saved_bytes = bytes_.rarely() ? saved / 2 : saved;
      args.saved = block(args.saved_bytes, Kind::output).memory.data();
    }
    call(args, gd_forward_workspace, gd_forward);
    if (!accepted_) return;
    check_filled(args.out);
    if (args.final_state_indices.dtype == GD_DTYPE_NONE && args.final_state.data != args.checkpoints.data)
      check_filled(args.final_state);
  }

  void backward() {
    gatedelta::BackwardArgs args;
    common(args);
    args.do_ = tensor({B_, T_, Hv_, V_}, float_of(), Kind::input);
    if (bytes_.sometimes()) args.dht = state(sequences_, Kind::input);
    const bool all = !bytes_.sometimes();
    if (all || bytes_.sometimes()) args.dq = tensor({B_, T_, Hk_, K_}, float_of(), Kind::output);
    if (all || bytes_.sometimes()) args.dk = tensor({B_, T_, Hk_, K_}, float_of(), Kind::output);
    if (all || bytes_.sometimes()) args.dv = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    if (all || bytes_.sometimes()) args.dg = tensor({B_, T_, Hv_}, float_of(), Kind::output);
    if (all || bytes_.sometimes()) args.dbeta = tensor({B_, T_, Hv_}, float_of(), Kind::output);
    if (args.in.gate == GD_GATE_RAW && bytes_.sometimes()) args.dA_log = tensor({Hv_}, float_of(), Kind::output);
    if (args.in.gate == GD_GATE_RAW && bytes_.sometimes()) args.d_dt_bias = tensor({Hv_}, float_of(), Kind::output);
    if (bytes_.sometimes()) args.d_initial_state = state(sequences_, Kind::output);
    if (bytes_.rarely()) args.dht_indices = slots({sequences_});
    const bool by_index = bytes_.rarely();
    if (by_index) args.d_initial_state_indices = slots({sequences_});
    if (bytes_.sometimes()) saved(args);
    call(args, gd_backward_workspace, gd_backward);
    if (!accepted_) return;
    for (const gd_tensor* t : {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.dA_log, &args.d_dt_bias})
      check_filled(*t);
    if (!by_index) check_filled(args.d_initial_state);
  }

  // Memory of the right size, and the call that it is of: this one's, or one of other sizes or flags.
  void saved(gd_backward_args& args) {
    gatedelta::ForwardArgs forward;
    forward.exec = args.exec;
    forward.in = args.in;
    forward.out = args.do_;
    size_t size = 0;
    if (gd_forward_saved_size(&forward, &size) != GD_OK) return;
    args.saved_bytes = size;
    args.saved = block(size, Kind::input).memory.data();
    if (gd_forward_saved_call(&forward, &args.saved_call) != GD_OK || !bytes_.rarely()) return;
    reinterpret_cast<uint8_t*>(&args.saved_call)[bytes_.next() % sizeof args.saved_call] ^= bytes_.next();
  }

  template <class Args>
  int64_t sequence_range(Args& args) {
    if (!bytes_.rarely()) {
      args.in.initial_state = args.in.initial_state_indices = {};
      args.in.first_slot = 0;
    }
    args.first_sequence = bytes_.sometimes() ? bytes_.next() % 4 - 1 : 0;
    args.sequence_count = bytes_.sometimes() ? bytes_.next() % 4 - 1 : 0;
    args.skip_faded = bytes_.next() & 1;
    return args.sequence_count > 0 ? args.sequence_count : std::max<int64_t>(sequences_ - args.first_sequence, 0);
  }

  void summary() {
    gatedelta::SummaryArgs args;
    common(args);
    const int64_t count = sequence_range(args);
    if (bytes_.sometimes()) args.in.q = {};
    args.local_state = state(count, Kind::output);
    if (!bytes_.sometimes()) args.transition = tensor({count, Hv_, K_, K_}, GD_F32, Kind::output);
    if (!bytes_.sometimes()) args.fade = tensor({count, Hv_}, GD_F32, Kind::output);
    call(args, gd_summary_workspace, gd_summary);
    if (!accepted_) return;
    check_filled(args.local_state);
    check_filled(args.transition);
  }

  void backward_summary() {
    gatedelta::BackwardSummaryArgs args;
    common(args);
    const int64_t count = sequence_range(args);
    if (bytes_.sometimes()) args.in.v = {};
    args.do_ = tensor({B_, T_, Hv_, V_}, float_of(), Kind::input);
    args.d_local = state(count, Kind::output);
    call(args, gd_backward_summary_workspace, gd_backward_summary);
    if (accepted_) check_filled(args.d_local);
  }

  void merge() {
    gatedelta::MergeArgs args;
    vk_ = bytes_.next() & 1;
    args.state_layout = bytes_.rarely() ? bytes_.next() : vk_;
    args.transposed = bytes_.next() & 1;
    const int64_t segments = bytes_.pick<int64_t>({3, 1, 5, 0}), results = bytes_.pick<int64_t>({2, 1, 4, 0});
    args.values = state(segments, Kind::input);
    args.transitions = tensor({segments, Hv_, K_, K_}, GD_F32, Kind::key);
    args.first = indices({results}, 0, segments);
    args.count = indices({results}, -1, bytes_.rarely() ? segments + 1 : 2);
    args.state = state(results, Kind::output);
    execution(args);
    call(args, gd_merge_workspace, gd_merge);
    if (accepted_) check_filled(args.state);
  }

  void recurrent() {
    gatedelta::RecurrentArgs args;
    common(args);
    if (!bytes_.sometimes()) args.out = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    final_states(args);
    if (bytes_.sometimes()) args.accept_lengths = indices({sequences_}, 0, T_ + 1);
    if (args.in.initial_state_indices.dtype != GD_DTYPE_NONE && bytes_.sometimes()) {
      args.in.initial_state_indices = slots({sequences_, bytes_.pick<int64_t>({3, 1, 2, 0})});
      if (!bytes_.rarely()) args.previous_accept_lengths = indices({sequences_}, -1, 5);
    }
    if (bytes_.sometimes()) {
      if (bytes_.sometimes()) {
        args.step_states = bytes_.sometimes() ? args.in.initial_state : state(T_ * B_ + 1, Kind::output);
        const bool rows = packed_ && bytes_.sometimes();
        args.step_indices = indices({rows ? sequences_ : B_, rows ? T_ / 2 + 1 : T_}, -1, T_ * B_ + 1);
      } else {
        args.step_states = tensor({B_, T_, Hv_, vk_ ? V_ : K_, vk_ ? K_ : V_}, float_of(), Kind::output);
      }
    }
    call(args, gd_recurrent_workspace, gd_recurrent);
    if (!accepted_) return;
    check_filled(args.out);
    if (args.final_state_indices.dtype == GD_DTYPE_NONE && args.final_state.data != args.step_states.data)
      check_filled(args.final_state);
  }

  void gated_norm() {
    gatedelta::GatedNormArgs args;
    norm_inputs(args);
    args.out = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    call(args, gd_gated_norm_workspace, gd_gated_norm);
    if (accepted_) check_filled(args.out);
  }

  void gated_norm_backward() {
    gatedelta::GatedNormBackwardArgs args;
    norm_inputs(args);
    args.dy = tensor({B_, T_, Hv_, V_}, float_of(), Kind::input);
    if (!bytes_.sometimes()) args.dx = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    if (!bytes_.sometimes() && (args.gate.rank || bytes_.rarely()))
      args.dgate = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    if (!bytes_.sometimes() && (args.weight.rank || bytes_.rarely()))
      args.dweight = tensor({V_}, float_of(), Kind::output);
    call(args, gd_gated_norm_backward_workspace, gd_gated_norm_backward);
    if (!accepted_) return;
    for (const gd_tensor* t : {&args.dx, &args.dgate, &args.dweight}) check_filled(*t);
  }

  template <class Args>
  void norm_inputs(Args& args) {
    args.x = tensor({B_, T_, Hv_, V_}, float_, Kind::input);
    norm_options(args);
    execution(args);
  }
  template <class Args>
  void norm_options(Args& args) {
    if (!bytes_.sometimes()) args.gate = tensor({B_, T_, Hv_, V_}, float_of(), Kind::input);
    if (!bytes_.sometimes()) args.weight = tensor({V_}, float_of(), Kind::input);
    args.activation = args.gate.rank || bytes_.rarely() ? bytes_.pick({0, 1, 0, 1}) : 0;
    if (bytes_.rarely()) args.activation = bytes_.next();
    args.round_before_gate = bytes_.next() & 1;
    args.has_eps = bytes_.next() & 1;
    args.eps = args.has_eps || bytes_.rarely() ? 0.25f : 0.0f;
    if (bytes_.rarely()) args.reserved[bytes_.next() % 4] = 1;
  }

  void conv1d() {
    gatedelta::Conv1dArgs args;
    conv_inputs(args);
    if (!bytes_.sometimes()) args.out = tensor({B_, T_, V_}, float_of(), Kind::output);
    if (bytes_.sometimes()) {
      if (bytes_.sometimes()) {
        args.final_state = args.in.initial_state;
      } else {
        args.final_state = tensor({sequences_ + 3, V_, bytes_.pick<int64_t>({3, 4, 9})}, float_of(), Kind::output);
      }
      if (bytes_.next() & 1) args.final_state_indices = slots({sequences_});
    }
    if (bytes_.sometimes()) args.previous_accept_lengths = indices({sequences_}, 1, 2);
    if (bytes_.sometimes()) args.step_states = tensor({B_, T_, V_, taps_ - 1}, float_of(), Kind::output);
    call(args, gd_conv1d_workspace, gd_conv1d);
    if (accepted_) check_filled(args.out);
  }

  void conv1d_backward() {
    gatedelta::Conv1dBackwardArgs args;
    conv_inputs(args);
    args.dy = tensor({B_, T_, V_}, float_of(), Kind::input);
    if (bytes_.sometimes()) args.dht = tensor({sequences_, V_, 5}, float_of(), Kind::input);
    if (!bytes_.sometimes()) args.dx = tensor({B_, T_, V_}, float_of(), Kind::output);
    if (!bytes_.sometimes()) args.dweight = tensor({V_, taps_}, float_of(), Kind::output);
    if (bytes_.sometimes()) args.dbias = tensor({V_}, float_of(), Kind::output);
    if (bytes_.sometimes())
      args.d_initial_state = tensor({sequences_, V_, bytes_.pick<int64_t>({3, 4, 9})}, float_of(), Kind::output);
    call(args, gd_conv1d_backward_workspace, gd_conv1d_backward);
    if (!accepted_) return;
    for (const gd_tensor* t : {&args.dx, &args.dweight, &args.dbias, &args.d_initial_state}) check_filled(*t);
  }

  // What the convolution and its backward take; V_ is the number of channels.
  template <class Args>
  void conv_inputs(Args& args) {
    gd_conv1d_inputs& in = args.in;
    const bool packed = bytes_.sometimes();
    if (packed) B_ = 1;
    sequences_ = packed ? bytes_.pick<int64_t>({2, 1, 4, 0}) : B_;
    V_ -= bytes_.next() % 4;
    taps_ = bytes_.pick<int64_t>({4, 3, 2, 4});
    in.x = tensor({B_, T_, V_}, float_, Kind::input);
    in.weight = tensor({V_, taps_}, float_of(), Kind::key);
    if (bytes_.sometimes()) in.bias = tensor({V_}, float_of(), Kind::input);
    if (packed) in.cu_seqlens = offsets();
    if (bytes_.sometimes()) {
      const bool pool = bytes_.sometimes();
      in.initial_state =
          tensor({pool ? sequences_ + 3 : sequences_, V_, bytes_.pick<int64_t>({3, 4, 9})}, float_of(), Kind::input);
      if (pool) in.initial_state_indices = slots({sequences_});
      if (pool) in.first_slot = bytes_.next() & 1;
    }
    in.activation = bytes_.rarely() ? bytes_.next() : bytes_.next() & 1;
    if (bytes_.rarely()) in.reserved[bytes_.next() % 4] = 1;
    execution(args);
  }

  // The three operations' own arguments, without what lies between them.
  void layer_step() {
    gatedelta::LayerStepArgs args;
    T_ = bytes_.pick<int64_t>({1, 2, 3, 0});
    common(args.rule);
    args.rule.in.q = args.rule.in.k = args.rule.in.v = {};
    final_states(args.rule);
    if (bytes_.sometimes()) {
      args.rule.step_states = bytes_.sometimes() ? args.rule.in.initial_state : state(B_ * T_ + 2, Kind::output);
      args.rule.step_indices = slots({B_, T_});
    }
    if (args.rule.in.initial_state_indices.dtype != GD_DTYPE_NONE && bytes_.sometimes()) {
      args.rule.in.initial_state_indices = slots({sequences_, 2});
      args.rule.previous_accept_lengths = indices({sequences_}, 1, 2);
    }
    const int64_t channels = 2 * Hk_ * K_ + Hv_ * V_;
    taps_ = bytes_.pick<int64_t>({4, 3, 2, 4});
    gd_conv1d_inputs& conv = args.conv.in;
    conv.x = tensor({B_, T_, channels}, float_, Kind::key);
    conv.weight = tensor({channels, taps_}, float_of(), Kind::key);
    if (bytes_.sometimes()) conv.bias = tensor({channels}, float_of(), Kind::key);
    if (!bytes_.sometimes()) {
      const int64_t slots = args.rule.in.initial_state_indices.rank ? sequences_ + 3 : sequences_;
      conv.initial_state = tensor({slots, channels, bytes_.pick<int64_t>({3, 4, 9})}, float_of(), Kind::input);
      if (!bytes_.rarely()) args.conv.final_state = conv.initial_state;
    }
    conv.activation = bytes_.next() & 1;
    norm_options(args.norm);
    args.norm.out = tensor({B_, T_, Hv_, V_}, float_of(), Kind::output);
    args.key_heads = bytes_.rarely() ? bytes_.next() : Hk_;
    if (bytes_.rarely()) args.rule.out = args.norm.out;
    if (bytes_.rarely()) args.norm.out = args.norm.gate;
    execution(args);
    call(args, gd_layer_step_workspace, gd_layer_step);
    if (accepted_) check_filled(args.norm.out);
  }

  // What all operations of the rule take.
  template <class Args>
  void common(Args& args) {
    gd_inputs& in = args.in;
    const bool packed = packed_ = bytes_.sometimes();
    if (packed) B_ = 1;
    sequences_ = packed ? bytes_.pick<int64_t>({2, 1, 4, 0}) : B_;
    vk_ = bytes_.next() & 1;
    in.state_layout = bytes_.rarely() ? bytes_.next() : vk_;
    in.q = tensor({B_, T_, Hk_, K_}, float_, Kind::key);
    in.k = tensor({B_, T_, Hk_, K_}, float_, Kind::key);
    in.v = tensor({B_, T_, Hv_, V_}, float_, Kind::input);
    in.g = tensor({B_, T_, Hv_}, float_of(), Kind::gate);
    in.beta = tensor({B_, T_, Hv_}, float_of(), Kind::key);
    in.gate = bytes_.sometimes() ? bytes_.pick<int32_t>({GD_GATE_RAW, GD_GATE_RAW, GD_GATE_RAW, 5}) : 0;
    if (in.gate == GD_GATE_RAW) in.g = tensor({B_, T_, Hv_}, float_of(), Kind::input);
    if (in.gate == GD_GATE_RAW || bytes_.rarely()) in.A_log = tensor({Hv_}, float_of(), Kind::input);
    if (in.gate == GD_GATE_RAW && bytes_.sometimes()) in.dt_bias = tensor({Hv_}, float_of(), Kind::input);
    in.beta_kind = bytes_.pick({0, 1, 2, 0});
    in.l2norm = bytes_.next() & 1;
    if (bytes_.sometimes()) in.key_head_order = bytes_.pick<int32_t>({1, 1, 1, 2});
    in.has_scale = bytes_.next() & 1;
    in.scale = in.has_scale || bytes_.rarely() ? 0.25f : 0.0f;
    if (packed) in.cu_seqlens = offsets();
    if (bytes_.sometimes()) {
      const bool pool = bytes_.sometimes();
      in.initial_state = state(pool ? sequences_ + 3 : sequences_, Kind::input);
      if (pool) in.initial_state_indices = slots({sequences_});
      if (pool && bytes_.sometimes()) in.first_slot = bytes_.pick<int64_t>({1, 2, 100, -1});
    }
    if (bytes_.rarely()) in.first_slot = bytes_.next() - 1;
    if (bytes_.rarely()) in.reserved[bytes_.next() % 2] = 1;
    execution(args);
  }

  template <class Args>
  void execution(Args& args) {
    gd_exec& exec = args.exec;
    exec.isa = bytes_.sometimes() ? bytes_.next() % 10 : 0;
    if (bytes_.sometimes()) {
      exec.parallel_for = [](void*, int64_t count, gd_task_fn run, void* task) {
        while (count > 0) run(task, --count);
      };
      exec.num_threads = bytes_.pick({0, 1, 3, 7});
    }
    if (bytes_.rarely()) exec.num_threads = bytes_.next() - 1;
    if (bytes_.rarely()) exec.device = bytes_.next();
    if (bytes_.rarely()) exec.stream = &exec;
    if (bytes_.rarely()) exec.kernels = bytes_.next() - 1;
    if (bytes_.rarely()) {
      tuning_ = GD_TUNING_INIT;
      tuning_.segment_chunks = bytes_.next() - 1;
      tuning_.persistent_segment_chunks = bytes_.rarely() ? bytes_.next() - 1 : 0;
      tuning_.segment_halves = bytes_.rarely();
      if (bytes_.rarely()) tuning_.struct_size = bytes_.next();
      exec.tuning = &tuning_;
    }
    if (bytes_.rarely()) args.struct_size = bytes_.next();
  }

  template <class Args>
  void final_states(Args& args) {
    if (!bytes_.sometimes()) return;
    const bool pool = bytes_.sometimes();
    if (bytes_.sometimes()) {
      args.final_state = args.in.initial_state;
    } else {
      args.final_state = state(pool ? sequences_ + 3 : sequences_, Kind::output);
    }
    if (pool) args.final_state_indices = slots({sequences_});
  }

  template <class Args, class Query, class Call>
  void call(Args& args, Query query, Call call) {
    constexpr size_t kUnset = ~size_t{0};
    size_t needed = kUnset;
    const gd_status asked = query(&args, &needed);
    require((asked == GD_OK) == (needed != kUnset), "a query answers exactly when it succeeds");
    if (asked == GD_OK) {
      args.exec.workspace_bytes = bytes_.rarely() ? needed / 2 : needed;
      Block& workspace = block(args.exec.workspace_bytes, Kind::output);
      workspace.scratch = true;
      args.exec.workspace = bytes_.rarely() ? nullptr : workspace.memory.data();
    }
    for (Block& b : blocks_) b.before.assign(start(b), start(b) + b.size);
    const gd_status status = call(&args);
    require(asked == GD_OK || status != GD_OK, "a call is refused if its query is");
    require(status != GD_INTERNAL, "no call fails inside");
    accepted_ = status == GD_OK;
    accepted_calls += accepted_;
    if (accepted_) return;
    require(gd_last_error()[0] != 0, "a refusal has a message");
    for (const Block& b : blocks_)
      require(b.scratch || std::equal(b.before.begin(), b.before.end(), start(b)), "a refused call writes nothing");
  }

  // Every element of an output is finite, and what lies between its elements is as it was. The output started as NaN.
  void check_filled(const gd_tensor& t) {
    if (t.dtype == GD_DTYPE_NONE) return;
    const size_t size = bytes_of(t.dtype);
    const Block* block = nullptr;
    for (const Block& b : blocks_)
      if (start(b) == t.data) block = &b;
    if (!block) return;  // empty, or the very tensor another output is
    std::vector<bool> element(block->size / size, false);
    std::vector<int64_t> index(static_cast<size_t>(t.rank), 0);
    for (int d = 0; d < t.rank; ++d)
      if (t.shape[d] == 0) return;
    for (;;) {
      int64_t offset = 0;
      for (int d = 0; d < t.rank; ++d) offset += t.shape[d] > 1 ? index[static_cast<size_t>(d)] * t.stride[d] : 0;
      element[static_cast<size_t>(offset)] = true;
      require(is_finite(static_cast<const char*>(t.data) + offset * static_cast<int64_t>(size), t.dtype),
              "an accepted call fills its outputs with finite numbers");
      int d = t.rank - 1;
      while (d >= 0 && ++index[static_cast<size_t>(d)] == t.shape[d]) index[static_cast<size_t>(d--)] = 0;
      if (d < 0) break;
    }
    for (size_t i = 0; i < element.size(); ++i)
      require(element[i] || std::memcmp(start(*block) + i * size, block->before.data() + i * size, size) == 0,
              "gaps between an output's elements stay as they were");
  }

  static bool is_finite(const char* data, int32_t dtype) {
    if (dtype == GD_F32) {
      float value;
      std::memcpy(&value, data, sizeof value);
      return std::isfinite(value);
    }
    uint16_t bits;
    std::memcpy(&bits, data, sizeof bits);
    const uint16_t exponent = dtype == GD_BF16 ? 0x7f80 : 0x7c00;
    return (bits & exponent) != exponent;
  }

  static char* start(const Block& b) { return static_cast<char*>(b.memory.data()); }

  Block& block(size_t size, Kind kind) {
    Block& b = blocks_.emplace_back();
    b.memory.reserve(size);
    b.size = size;
    if (size) std::memset(b.memory.data(), kind == Kind::output ? 0xff : 0, size);
    return b;
  }

  int32_t float_of() { return bytes_.pick<int32_t>({GD_F32, GD_BF16, GD_F16, float_}); }
  gd_tensor state(int64_t count, Kind kind) {
    return tensor({count, Hv_, vk_ ? V_ : K_, vk_ ? K_ : V_}, float_of(), kind);
  }

  gd_tensor tensor(std::initializer_list<int64_t> shape, int32_t dtype, Kind kind) {
    gd_tensor t = gatedelta::tensor(nullptr, static_cast<gd_dtype>(dtype), shape);
    if (bytes_.next() % 32 == 31) distort(t);
    place(t, kind);
    return t;
  }

  // Strides that are fine, and things that are not.
  void distort(gd_tensor& t) {
    const int d = bytes_.next() % t.rank;
    switch (bytes_.next() % 12) {
      case 0: t.stride[0] += 16; break;
      case 1: t.stride[d] = 0; break;
      case 2:
        for (int i = 0; i <= d && i + 1 < t.rank; ++i) t.stride[i] *= 2;
        break;
      case 3: t.stride[d] = -t.stride[d]; break;
      case 4: t.stride[d] = std::numeric_limits<int64_t>::max(); break;
      case 5: t.shape[d] += 1; break;
      case 6: t.shape[d] = -1; break;
      case 7: t.dtype = bytes_.next() - 1; break;
      case 8: t.rank = bytes_.next(); break;
      case 9: t.stride[d] += 1; break;
      default: break;
    }
  }

  // Memory of exactly what the tensor claims, if it claims something sane.
  void place(gd_tensor& t, Kind kind) {
    if (t.dtype < GD_F32 || t.dtype > GD_I64 || t.rank < 0 || t.rank > GD_MAX_RANK || bytes_.rarely()) return;
    int64_t last = 0;
    for (int d = 0; d < t.rank; ++d) {
      if (t.shape[d] <= 0) return;
      if (t.shape[d] == 1) continue;
      if (t.stride[d] < 0 || t.stride[d] > (1 << 24)) return;
      last += (t.shape[d] - 1) * t.stride[d];
    }
    const size_t count = static_cast<size_t>(last) + 1, size = bytes_of(t.dtype);
    const size_t shift = bytes_.rarely() ? 1 : 0;
    Block& b = block(count * size + shift, kind);
    t.data = start(b) + shift;
    if (kind == Kind::output) return;
    for (size_t i = 0; i < count; ++i) {
      const size_t at = (i * 7 + bytes_seed_) % 16;
      const Number& number = kind == Kind::key ? kKeys[at % 2] : kind == Kind::gate ? kGates[at % 4] : kNumbers[at % 4];
      char* const to = static_cast<char*>(t.data) + i * size;
      if (t.dtype == GD_F32) {
        std::memcpy(to, &number.f32, 4);
      } else if (t.dtype == GD_BF16) {
        std::memcpy(to, &number.bf16, 2);
      } else if (t.dtype == GD_F16) {
        std::memcpy(to, &number.f16, 2);
      }
    }
    bytes_seed_ += 5;
  }

  // Values in [low, high], a little beyond now and then.
  gd_tensor indices(std::initializer_list<int64_t> shape, int64_t low, int64_t high) {
    gd_tensor t = tensor(shape, bytes_.pick<int32_t>({GD_I32, GD_I64}), Kind::output);
    if (!t.data) return t;
    const size_t size = bytes_of(t.dtype);
    for (size_t i = 0; i < blocks_.back().size / size; ++i) {
      int64_t value = low + (bytes_.next() + static_cast<int64_t>(i)) % (high - low + 1);
      if (bytes_.rarely()) value = bytes_.pick<int64_t>({-1, high + 1, std::numeric_limits<int32_t>::max()});
      write(static_cast<char*>(t.data) + i * size, size, value);
    }
    return t;
  }
  gd_tensor slots(std::initializer_list<int64_t> shape) { return indices(shape, -1, sequences_ + 2); }

  // Multiples of a chunk, mostly.
  gd_tensor chunk_offsets() {
    gd_tensor t = tensor({sequences_}, bytes_.pick<int32_t>({GD_I32, GD_I64}), Kind::output);
    if (!t.data) return t;
    const size_t size = bytes_of(t.dtype);
    for (size_t i = 0; i < blocks_.back().size / size; ++i)
      write(static_cast<char*>(t.data) + i * size, size, bytes_.pick<int64_t>({0, 64, 0, 128, -1, 0, 64, 65}));
    return t;
  }

  gd_tensor offsets() {
    gd_tensor t = tensor({sequences_ + 1}, bytes_.pick<int32_t>({GD_I32, GD_I64}), Kind::output);
    if (!t.data) return t;
    const size_t size = bytes_of(t.dtype);
    int64_t at = bytes_.rarely() ? 1 : 0;
    for (size_t i = 0; i < blocks_.back().size / size; ++i) {
      write(static_cast<char*>(t.data) + i * size, size, at);
      at += bytes_.rarely() ? -1 : T_ > 0 ? bytes_.next() % (T_ + 1) / (sequences_ > 0 ? sequences_ : 1) : 0;
    }
    return t;
  }

  static void write(char* to, size_t size, int64_t value) {
    const auto narrow = static_cast<int32_t>(value);
    if (size == 8) std::memcpy(to, &value, 8);
    if (size == 4) std::memcpy(to, &narrow, 4);
  }

  Bytes bytes_;
  gd_tuning tuning_{};
  std::list<Block> blocks_;
  int64_t B_ = 0, T_ = 0, Hk_ = 0, Hv_ = 0, K_ = 0, V_ = 0, taps_ = 0, sequences_ = 0;
  int32_t float_ = GD_F32;
  bool vk_ = false, packed_ = false, accepted_ = false;
  size_t bytes_seed_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Caller(Bytes(data, size)).run();
  return 0;
}
