// A hundred thousand random recurrent steps over pools of states, as a serving engine makes them: decode, drafts,
// packed drafts, commits, padded rows. Steps come in rounds. A round has a pool, and each of its steps goes on with the
// states that the steps before left there. Two rounds are in flight at any time, on two streams with their own memory.
// Each round runs once on each stream, and both runs must leave the same bits. Steps like them are judged by the fp64
// truth.
//
//   gpu_soak_decode [--steps 100000] [--seed 1]   each round is a function of the seed and its number
//
// Exit status 1: a difference, a failing call or a hang. 2: it could not start.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "soak.hpp"
#include "testing/judge.hpp"

namespace gatedelta::testing {
namespace {

constexpr int64_t kSteps = 20;  // of a round
constexpr int64_t kMaxSequences = 8, kMaxTokens = 8, kMaxValueHeads = 8, kMaxPad = 5;
constexpr int64_t kStepSlots = 8;                           // for states after single tokens
constexpr int64_t kNamed = 2 * kMaxSequences + kStepSlots;  // most slots that indices name
constexpr int64_t kSpare = 2;                               // slots that none names; they stay poisoned

// Half of them have the sizes that the fast kernels are for.
constexpr const char* kKinds[] = {
    "K=128 V=128 dtype=bf16 l2norm gate=raw beta=logit gdtype=bf16",
    "K=128 V=128 dtype=bf16 l2norm gate=raw beta=logit gdtype=bf16 state=bf16",
    "K=128 V=128 dtype=fp16 gate=strong keys=correlated gdtype=fp16 state=fp16",
    "K=128 V=128 dtype=bf16 gate=inf beta=two",
    "K=128 V=128 dtype=fp32 gate=mixed",
    "K=64 V=32 dtype=bf16 l2norm gate=raw beta=logit dt_bias=0 state=bf16",
    "K=96 V=144 dtype=fp16",
    "K=256 V=256 dtype=bf16 gate=mixed",
};

// ---- contents -----------------------------------------------------------------------------------------------------

// Inputs of one kind on the device. Steps use random parts of them: drawing numbers would take longer than a step.
class Contents {
 public:
  explicit Contents(const char* kind) : spec_(parse_case(kind)) {
    Case c = spec_;
    c.Hk = c.Hv = kMaxValueHeads;
    c.B = kNamed;
    c.T = (kMaxSequences * kMaxTokens + kMaxPad) / c.B + 1;
    const Problem problem(c);
    in_ = problem.recurrent.in;
    for (gd_tensor* t : {&in_.q, &in_.k, &in_.v, &in_.g, &in_.beta, &in_.A_log, &in_.dt_bias, &in_.initial_state}) {
      if (!t->data) continue;
      memory_.push_back(std::make_unique<DeviceMemory>(bytes_of(*t), 0));
      memory_.back()->upload(t->data);
      t->data = memory_.back()->data();
    }
  }

  const Case& spec() const { return spec_; }
  const gd_inputs& inputs() const { return in_; }

 private:
  Case spec_;
  gd_inputs in_{};
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

// What a step does, by number of sequences and tokens.
struct Plan {
  int64_t N, T;                  // sequences; tokens of each, or the most of them
  std::vector<int64_t> lengths;  // not empty: packed
  int64_t pad = 0;
  enum { kFinal, kAccept, kNothing, kEvery, kEverySlot } store = kFinal;
  bool has_output = true, in_place = true;

  int64_t tokens() const {
    int64_t sum = pad;
    for (const int64_t length : lengths) sum += length;
    return lengths.empty() ? N * T : sum;
  }
};

Plan draw_plan(Dice& dice, int64_t N) {
  Plan plan{.N = N, .T = dice.one_in(2) ? 1 : 2 + dice.below(kMaxTokens - 1), .lengths = {}};
  if (dice.one_in(3)) {
    for (int64_t n = 0; n < N; ++n) plan.lengths.push_back(dice.below(plan.T + 1));
    plan.pad = dice.below(kMaxPad + 1);
  }
  plan.store = plan.T == 1 ? dice.of({Plan::kFinal, Plan::kFinal, Plan::kAccept})
                           : dice.of({Plan::kFinal, Plan::kAccept, Plan::kNothing, Plan::kEvery, Plan::kEverySlot});
  plan.has_output = plan.store == Plan::kNothing || !dice.one_in(8);
  plan.in_place = !dice.one_in(4);
  return plan;
}

// ---- a round ------------------------------------------------------------------------------------------------------

// Steps whose own tensors lie in a lane's memory: indices, the pool, outputs of every step, each followed by a gap.
class Round {
 public:
  Round(const std::vector<std::unique_ptr<Contents>>& contents, uint64_t seed, uint64_t number) {
    Dice dice{seed, number};
    const Contents& kind = *contents[static_cast<size_t>(dice.below(std::size(kKinds)))];
    spec_ = kind.spec();
    spec_.Hk = dice.of<int64_t>({1, 2, 3, 4});
    spec_.Hv = spec_.Hk * dice.of<int64_t>({1, 2});
    spec_.layout = dice.of({GD_STATE_KV, GD_STATE_VK, GD_STATE_VK});
    spec_.i64 = dice.one_in(2);
    const int64_t N = 1 + dice.below(kMaxSequences);
    named_ = 2 * N + kStepSlots;
    first_states_ = part_of(kind.inputs().initial_state, states({named_}), spec_.K * spec_.V, dice);
    pool_ = contiguous(spec_.state, states({named_ + kSpare}));
    for (int64_t i = 0; i < kSteps; ++i) add_step(kind.inputs(), draw_plan(dice, N), dice);
    indices_.resize(end_);
    pool_begin_ = place(bytes_of(pool_));
    for (Step& step : steps_) {
      for (const int part : {kOutput, kStates}) {
        const gd_tensor& t = *own_tensors(step.args)[part];
        if (t.dtype && !(part == kStates && step.is_pool)) step.begin[part] = place(bytes_of(t));
      }
    }
  }

  const Case& spec() const { return spec_; }
  size_t bytes() const { return end_; }
  const std::vector<char>& indices() const { return indices_; }  // at the beginning
  size_t pool() const { return pool_begin_; }                    // everything from here on is poisoned
  size_t results_bytes() const { return end_ - pool_begin_; }
  const gd_tensor& first_states() const { return first_states_; }

  void run(char* memory, cudaStream_t stream) const {
    for (const Step& step : steps_) {
      gd_recurrent_args args = step.args;
      const auto tensors = own_tensors(args);
      for (int part = 0; part < kParts; ++part) {
        if (tensors[part]->dtype) tensors[part]->data = memory + step.begin[part];
      }
      const auto in_pool = [&](gd_tensor& t) { t = pool_, t.data = memory + pool_begin_; };
      in_pool(args.in.initial_state);
      if (step.has_final) in_pool(args.final_state);
      if (step.is_pool) in_pool(args.step_states);
      args.exec.device = GD_CUDA;
      args.exec.stream = stream;
      if (gd_recurrent(&args) != GD_OK) throw std::runtime_error(gd_last_error());
    }
  }

  // Obvious errors of the results: not written, not finite, or written where nothing belongs.
  std::string complaint(const char* results) const {
    const size_t named = bytes_of(pool_) / static_cast<size_t>(named_ + kSpare) * static_cast<size_t>(named_);
    if (!all_finite(spec_.state, results, named)) return "a state of the pool is not finite";
    size_t end = named;  // of what may be written so far
    for (const Step& step : steps_) {
      for (const int part : {kOutput, kStates}) {
        gd_recurrent_args args = step.args;
        const gd_tensor& t = *own_tensors(args)[part];
        if (!t.dtype || (part == kStates && step.is_pool)) continue;
        const size_t begin = step.begin[part] - pool_begin_;
        if (!poisoned(results + end, begin - end)) return "a write outside of the tensors";
        if (part == kOutput && !all_finite(t.dtype, results + begin, bytes_of(t))) {
          return "o is not finite, or not fully written";
        }
        end = begin + bytes_of(t);
      }
    }
    return poisoned(results + end, results_bytes() - end) ? "" : "a write past the end of the last output";
  }

 private:
  enum Part { kOffsets, kRead, kWrite, kAccepted, kPlaces, kOutput, kStates, kParts };
  struct Step {
    gd_recurrent_args args{};
    std::array<size_t, kParts> begin{};
    bool has_final = false, is_pool = false;  // is_pool: states after single tokens go to the pool, too
  };
  static std::array<gd_tensor*, kParts> own_tensors(gd_recurrent_args& a) {
    return {&a.in.cu_seqlens,       &a.in.initial_state_indices,
            &a.final_state_indices, &a.accept_lengths,
            &a.step_indices,        &a.out,
            &a.step_states};
  }

  std::vector<int64_t> states(std::vector<int64_t> outer) const {
    const bool k_first = spec_.layout == GD_STATE_KV;
    outer.insert(outer.end(), {spec_.Hv, k_first ? spec_.K : spec_.V, k_first ? spec_.V : spec_.K});
    return outer;
  }
  size_t place(size_t bytes) {
    constexpr size_t kAlign = 256;
    return std::exchange(end_, (end_ + bytes + 2 * kAlign - 1) / kAlign * kAlign);
  }
  void add_indices(Step& step, Part part, const std::vector<int64_t>& values, const std::vector<int64_t>& shape) {
    gd_tensor& t = *own_tensors(step.args)[part];
    t = contiguous(spec_.i64 ? GD_I64 : GD_I32, shape);
    step.begin[part] = place(bytes_of(t));
    indices_.resize(end_);
    for (size_t i = 0; i < values.size(); ++i) {
      store(indices_.data() + step.begin[part], t.dtype, static_cast<int64_t>(i), double(values[i]));
    }
  }

  void add_step(const gd_inputs& inputs, const Plan& plan, Dice& dice) {
    const int64_t N = plan.N, Hk = spec_.Hk, Hv = spec_.Hv, K = spec_.K, V = spec_.V;
    const int64_t rows = plan.lengths.empty() ? N : 1, T = plan.lengths.empty() ? plan.T : plan.tokens();
    Step step;
    gd_recurrent_args& args = step.args;
    args.struct_size = sizeof args;
    args.in = inputs;
    gd_inputs& in = args.in;
    in.q = part_of(in.q, {rows, T, Hk, K}, K, dice);
    in.k = part_of(in.k, {rows, T, Hk, K}, K, dice);
    in.v = part_of(in.v, {rows, T, Hv, V}, V, dice);
    in.g = part_of(in.g, {rows, T, Hv}, 1, dice);
    in.beta = part_of(in.beta, {rows, T, Hv}, 1, dice);
    if (in.A_log.dtype) in.A_log = part_of(in.A_log, {Hv}, 1, dice);
    if (in.dt_bias.dtype) in.dt_bias = part_of(in.dt_bias, {Hv}, 1, dice);
    in.state_layout = spec_.layout;
    if (plan.has_output) args.out = contiguous(spec_.dtype, {rows, T, Hv, V});

    // A slot that one sequence reads is written by no other: reads, writes and single tokens have their own ones.
    const auto order = dice.permutation(named_);
    const auto slot = [&](int64_t i) { return dice.one_in(6) ? -1 : i; };
    std::vector<int64_t> read(N), write(N), accepted(N);
    for (int64_t n = 0; n < N; ++n) {
      read[n] = slot(order[n]);
      write[n] = slot(order[plan.in_place ? n : N + n]);
      accepted[n] = dice.below((plan.lengths.empty() ? plan.T : plan.lengths[n]) + 1);
    }
    if (!plan.lengths.empty()) {
      std::vector<int64_t> offsets(N + 1, 0);
      std::partial_sum(plan.lengths.begin(), plan.lengths.end(), offsets.begin() + 1);
      add_indices(step, kOffsets, offsets, {N + 1});
    }
    add_indices(step, kRead, read, {N});
    step.has_final = plan.store == Plan::kFinal || plan.store == Plan::kAccept;
    if (step.has_final) add_indices(step, kWrite, write, {N});
    if (plan.store == Plan::kAccept) add_indices(step, kAccepted, accepted, {N});
    if (plan.store == Plan::kEvery) args.step_states = contiguous(spec_.state, states({rows, T}));
    if (plan.store == Plan::kEverySlot) {
      std::vector<int64_t> places(rows * T, -1);
      const auto tokens = dice.permutation(rows * T);
      for (int64_t i = 0; i < std::min(kStepSlots, rows * T); ++i) places[tokens[i]] = slot(order[2 * N + i]);
      add_indices(step, kPlaces, places, {rows, T});
      step.is_pool = true;
    }
    steps_.push_back(step);
  }

  Case spec_;
  std::vector<Step> steps_;
  gd_tensor first_states_{}, pool_{};
  int64_t named_ = 0;
  size_t pool_begin_ = 0, end_ = 0;
  std::vector<char> indices_;
};

// ---- running it ---------------------------------------------------------------------------------------------------

// A stream, memory for the round it runs, and room for the results of two rounds on the host.
class Lane {
 public:
  Lane(size_t bytes, size_t results_bytes) : memory_(bytes, 0), first_(results_bytes), second_(results_bytes) {}

  void start(const Round& round, int turn) {
    char *const memory = memory_.data(), *const pool = memory + round.pool();
    const auto& indices = round.indices();
    const gd_tensor& states = round.first_states();
    GD_CUDA_OK(cudaMemcpyAsync(memory, indices.data(), indices.size(), cudaMemcpyHostToDevice, stream_));
    GD_CUDA_OK(cudaMemsetAsync(pool, kPoison, round.results_bytes(), stream_));
    GD_CUDA_OK(cudaMemcpyAsync(pool, states.data, bytes_of(states), cudaMemcpyDeviceToDevice, stream_));
    round.run(memory, stream_);
    GD_CUDA_OK(cudaMemcpyAsync(result(turn), pool, round.results_bytes(), cudaMemcpyDeviceToHost, stream_));
  }
  void finish() { GD_CUDA_OK(cudaStreamSynchronize(stream_)); }
  char* result(int turn) const { return turn == 0 ? first_.data() : second_.data(); }
  cudaStream_t stream() const { return stream_; }

 private:
  CudaStream stream_;
  DeviceMemory memory_;
  PinnedMemory first_, second_;
};

class Soak {
 public:
  explicit Soak(uint64_t seed) : seed_(seed) {
    for (const char* kind : kKinds) contents_.push_back(std::make_unique<Contents>(kind));
  }

  bool run(uint64_t steps) {
    const uint64_t rounds = (steps + kSteps - 1) / kSteps;
    size_t bytes = 0, results_bytes = 0;
    for (uint64_t number = 0; number <= rounds; ++number) {
      const Round round(contents_, seed_, number);
      bytes = std::max(bytes, round.bytes());
      results_bytes = std::max(results_bytes, round.results_bytes());
    }
    Lane lanes[] = {{bytes, results_bytes}, {bytes, results_bytes}};
    uint64_t number = 0;
    while (number < rounds && failures_ < kMostFailures) {
      const Round pair[] = {{contents_, seed_, number}, {contents_, seed_, number + 1}};
      const std::string names[] = {name_of(number, pair[0].spec()), name_of(number + 1, pair[1].spec())};
      watchdog_.begin(names[0] + "\n  or " + names[1]);
      for (const int turn : {0, 1}) {
        for (const int i : {0, 1}) lanes[i].start(pair[i ^ turn], turn);
      }
      for (Lane& lane : lanes) lane.finish();
      watchdog_.end();
      for (const int i : {0, 1}) {
        const char* const results = lanes[i].result(0);
        const bool equal = std::memcmp(results, lanes[1 - i].result(1), pair[i].results_bytes()) == 0;
        expect_none(equal ? pair[i].complaint(results) : "the two streams' bits differ", names[i]);
      }
      if (number % kJudgeEvery == 0) judge(number, lanes);
      number += 2;
      if (number % kReportEvery == 0) report(number * kSteps, "steps");
    }
    report(number * kSteps, "steps in all");
    return failures_ == 0;
  }

  std::string current() { return watchdog_.watched(); }

 private:
  static constexpr uint64_t kJudgeEvery = 20, kReportEvery = 500, kMostFailures = 20;

  std::string name_of(uint64_t number, const Case& c) const {
    return "round " + std::to_string(number) + " of seed " + std::to_string(seed_) + ": " + describe(c);
  }

  void expect_none(const std::string& complaint, const std::string& name) {
    if (complaint.empty()) return;
    ++failures_;
    std::printf("FAILED %s\n  %s\n", name.c_str(), complaint.c_str());
    std::fflush(stdout);
  }

  // A step of its own contents and pool, on both streams, against the fp64 truth.
  void judge(uint64_t number, const Lane (&lanes)[2]) {
    Dice dice{seed_ + 1, number};
    Case c = parse_case(kKinds[dice.below(std::size(kKinds))]);
    const Plan plan = draw_plan(dice, 1 + dice.below(kMaxSequences));
    c.B = plan.lengths.empty() ? plan.N : 1;
    c.T = plan.T;
    c.lengths = plan.lengths;
    c.pad = plan.pad;
    c.Hk = dice.of<int64_t>({1, 2, 3, 4});
    c.Hv = c.Hk * dice.of<int64_t>({1, 2});
    c.layout = dice.of({GD_STATE_KV, GD_STATE_VK, GD_STATE_VK});
    c.ht = plan.store == Plan::kFinal || plan.store == Plan::kAccept;
    c.pool = true;
    c.inplace = c.ht && plan.in_place;
    c.i64 = dice.one_in(2);
    c.accept = plan.store == Plan::kAccept;
    c.steps = plan.store == Plan::kEvery       ? StepKind::dense
              : plan.store == Plan::kEverySlot ? StepKind::pool
                                               : StepKind::none;
    c.seed = number + 1;
    const std::string name = "judged " + name_of(number, c);
    Judge judge(c, {.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))});
    const auto outputs_of = [](const gd_recurrent_args& args) {
      std::vector<char> bytes;
      for (const gd_tensor* t : {&args.out, &args.final_state, &args.step_states}) {
        const char* const data = static_cast<const char*>(t->data);
        bytes.insert(bytes.end(), data, data + bytes_of(*t));
      }
      return bytes;
    };
    const auto run = [&](const gd_recurrent_args& host) -> std::string {
      DeviceRecurrent first(host), second(host);
      watchdog_.begin(name);
      std::string error = first.run(lanes[0].stream());
      if (error.empty()) error = second.run(lanes[1].stream());
      GD_CUDA_OK(cudaDeviceSynchronize());
      watchdog_.end();
      if (error.empty()) error = first.download(host);
      const auto bits = outputs_of(host);
      if (error.empty()) error = second.download(host);
      return error.empty() && bits != outputs_of(host) ? "the two streams' bits differ" : error;
    };
    const Judgement judgement = judge.recurrent(run);
    ++judged_;
    if (judgement.worst()) worst_ = std::max(worst_, judgement.worst()->comparison.margin);
    expect_none(judgement.ok() ? "" : judgement.text(), name);
  }

  void report(uint64_t done, const char* what) const {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
    std::printf("%llu %s, %llu judged, the worst at %.0f %% of its bound, %llu failed, %.0f s\n",
                static_cast<unsigned long long>(done), what, static_cast<unsigned long long>(judged_), 100 * worst_,
                static_cast<unsigned long long>(failures_), passed.count());
    std::fflush(stdout);
  }

  uint64_t seed_, judged_ = 0, failures_ = 0;
  double worst_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<Contents>> contents_;
  Watchdog watchdog_;
};

int run_main(const std::vector<std::string>& arguments) {
  uint64_t steps = 100000, seed = 1;
  if (!read_options(arguments, {{"--steps", &steps}, {"--seed", &seed}})) {
    std::fprintf(stderr, "usage: gpu_soak_decode [--steps 100000] [--seed 1]\n");
    return 2;
  }
  int devices = 0, major = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  if (devices > 0) GD_CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 8) {
    std::fprintf(stderr, "gpu_soak_decode: no CUDA device of compute capability 8.0 or later\n");
    return 2;
  }
  Soak soak(seed);
  try {
    return soak.run(steps) ? 0 : 1;
  } catch (const std::runtime_error& e) {  // the device is unusable, or the library refused
    std::printf("FAILED %s\n  %s\n", soak.current().c_str(), e.what());
    return 1;
  }
}

}  // namespace
}  // namespace gatedelta::testing

int main(int argc, char** argv) {
  try {
    return gatedelta::testing::run_main({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu_soak_decode: %s\n", e.what());
    return 1;
  }
}
