// Thousands of random ragged forwards. Two batches are in flight at any time, on two streams with their own memory.
// Each batch runs once on each stream, and both runs must give the same bits. Every 50th is also judged by the fp64
// truth.
//
//   gpu_soak [--batches 10000] [--seed 1]   random batches; each is a function of the seed and its number
//   gpu_soak --repeat 1000 [--seed 1]       one batch over and over
//   --portable 1                            either with the portable kernels
//
// Exit status 1: a difference, a failing call or a hang. 2: it could not start.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "soak.hpp"
#include "testing/judge.hpp"

namespace gatedelta::testing {
namespace {

constexpr int64_t kHead = 128, kMaxSequences = 24, kMaxKeyHeads = 4, kMaxValueHeads = 8 * kMaxKeyHeads;
constexpr int64_t kMaxRows = 1 << 15;  // tokens times value heads of a batch: longer batches have fewer heads

// ---- contents of the batches --------------------------------------------------------------------------------------

// Drawing random numbers on the host takes far longer than a batch. So each kind of contents is made once, and a batch
// uses random parts of it.
constexpr const char* kKinds[] = {
    "dtype=bf16",
    "dtype=fp16",
    "dtype=bf16 l2norm gate=raw beta=logit gdtype=bf16 state=bf16",
    "dtype=fp16 l2norm gate=raw beta=logit dt_bias=0",
    "dtype=bf16 gate=inf beta=two",
    "dtype=fp16 gate=strong keys=correlated gdtype=fp16 state=fp16",
};

Case case_of(size_t kind) {
  Case c = parse_case(kKinds[kind]);
  c.K = c.V = kHead;
  return c;
}

using Contents = std::vector<std::unique_ptr<DeviceForward>>;

Contents make_contents() {
  Contents contents;
  for (size_t kind = 0; kind < std::size(kKinds); ++kind) {
    Case c = case_of(kind);
    c.Hk = c.Hv = kMaxValueHeads;
    c.B = 2 * kMaxSequences + 4;  // states for the largest pool
    c.T = kMaxRows / (c.B * c.Hv) + 4;
    c.ht = c.dht = false;
    const Problem problem(c);
    contents.push_back(std::make_unique<DeviceForward>(problem.forward));
  }
  return contents;
}

Case draw_case(Dice& dice, size_t kind) {
  Case c = case_of(kind);
  for (int64_t i = 1 + dice.below(kMaxSequences); i > 0; --i) {
    c.lengths.push_back(dice.of<int64_t>({0, 1, 63, 64, 65, dice.below(200), dice.below(701)}));
  }
  if (dice.one_in(2)) c.pad = 1 + dice.below(150);
  do {
    c.Hk = 1 + dice.below(kMaxKeyHeads);
    c.Hv = c.Hk * dice.of<int64_t>({1, 2, 3, 4, 8});
  } while (c.total_tokens() * c.Hv > kMaxRows);
  c.layout = dice.of({GD_STATE_KV, GD_STATE_VK});
  c.h0 = !dice.one_in(4);
  c.ht = !dice.one_in(8);
  c.pool = dice.one_in(3);
  c.inplace = c.h0 && c.ht && dice.one_in(4);
  c.i64 = dice.one_in(2);
  c.every = dice.of<int64_t>({0, 0, 0, 64, 128, 192});
  if (dice.one_in(2)) c.segment = 2 + dice.below(3);  // far shorter than automatic ones, so every sequence is cut
  c.seed = dice.stream + 1;
  return c;
}

// ---- a batch ------------------------------------------------------------------------------------------------------

// A call whose own tensors lie in a lane's memory: offsets and indices, outputs, workspace, each followed by a gap.
class Batch {
 public:
  Batch(const Contents& contents, gd_kernels kernels, uint64_t seed, uint64_t number) {
    Dice dice{seed, number};
    const auto kind = static_cast<size_t>(dice.below(std::size(kKinds)));
    spec_ = draw_case(dice, kind);
    args_ = contents[kind]->args();
    args_.exec.kernels = kernels;
    args_.exec.tuning = &tuning_;
    const int64_t T = spec_.total_tokens(), N = spec_.sequences(), Hk = spec_.Hk, Hv = spec_.Hv;
    const int64_t slots = spec_.pool ? 2 * N + 3 : N;
    const auto states = [&](int64_t count) { return std::vector<int64_t>{count, Hv, kHead, kHead}; };
    gd_inputs& in = args_.in;
    in.q = part_of(in.q, {1, T, Hk, kHead}, kHead, dice);
    in.k = part_of(in.k, {1, T, Hk, kHead}, kHead, dice);
    in.v = part_of(in.v, {1, T, Hv, kHead}, kHead, dice);
    in.g = part_of(in.g, {1, T, Hv}, 1, dice);
    in.beta = part_of(in.beta, {1, T, Hv}, 1, dice);
    if (in.A_log.dtype) in.A_log = part_of(in.A_log, {Hv}, 1, dice);
    if (in.dt_bias.dtype) in.dt_bias = part_of(in.dt_bias, {Hv}, 1, dice);
    in.initial_state = spec_.h0 ? part_of(in.initial_state, states(slots), kHead * kHead, dice) : gd_tensor{};
    in.state_layout = spec_.layout;
    args_.out = contiguous(spec_.dtype, {1, T, Hv, kHead});
    if (spec_.ht) args_.final_state = contiguous(spec_.state, states(slots));

    std::vector<int64_t> offsets(N + 1, 0), read(N), write(N), checkpoints;
    std::partial_sum(spec_.lengths.begin(), spec_.lengths.end(), offsets.begin() + 1);
    const auto order = dice.permutation(slots);
    const auto slot = [&](int64_t i) { return dice.one_in(4) ? -1 : i; };
    for (int64_t n = 0; n < N; ++n) {
      read[n] = spec_.pool ? slot(order[n]) : n;
      write[n] = spec_.pool ? slot(order[spec_.inplace ? n : N + n]) : n;
    }
    written_states_ = write;
    tuning_.segment_chunks = static_cast<int32_t>(spec_.segment);
    if (spec_.every) {
      int64_t count = 0;
      for (const int64_t length : spec_.lengths) count += length / spec_.every;
      args_.checkpoints = contiguous(spec_.state, states(spec_.pool ? count + 2 : count));
      args_.checkpoint_every = spec_.every;
      const auto places = dice.permutation(args_.checkpoints.shape[0]);
      for (int64_t n = 0; n < N; ++n) {
        // A padded sequence has its entries, but nothing is stored in them.
        const bool is_padding = spec_.pool && spec_.h0 && spec_.ht && read[n] < 0 && write[n] < 0;
        for (int64_t i = spec_.lengths[n] / spec_.every; i > 0; --i) {
          const auto entry = static_cast<int64_t>(checkpoints.size());
          checkpoints.push_back(spec_.pool ? slot(places[entry]) : entry);
          written_checkpoints_.push_back(is_padding ? -1 : checkpoints.back());
        }
      }
    }

    add_indices(kOffsets, offsets);
    if (spec_.pool && spec_.h0) add_indices(kRead, read);
    if (spec_.pool && spec_.ht) add_indices(kWrite, write);
    if (spec_.pool && spec_.every) add_indices(kPlaces, checkpoints);
    for (const int part : {kOutput, kFinal, kCheckpoints}) begin_[part] = place(bytes_of(*own_tensors(args_)[part]));
    if (gd_forward_workspace(&args_, &args_.exec.workspace_bytes) != GD_OK) throw std::runtime_error(gd_last_error());
    workspace_ = place(args_.exec.workspace_bytes);
  }

  Batch(const Batch&) = delete;  // its arguments point to its tuning
  Batch& operator=(const Batch&) = delete;
  const Case& spec() const { return spec_; }
  size_t bytes() const { return end_; }
  const std::vector<char>& indices() const { return indices_; }  // at the beginning
  size_t outputs() const { return begin_[kOutput]; }             // everything from here on is poisoned
  size_t outputs_bytes() const { return workspace_ - begin_[kOutput]; }

  gd_forward_args over(char* memory) const {
    gd_forward_args args = args_;
    const auto tensors = own_tensors(args);
    for (int part = 0; part < kParts; ++part) {
      if (tensors[part]->dtype) tensors[part]->data = memory + begin_[part];
    }
    args.exec.workspace = memory + workspace_;
    return args;
  }

  // Obvious errors of the outputs: not written, not finite, or written where nothing belongs.
  std::string complaint(const char* outputs) const {
    gd_forward_args args = args_;
    for (const int part : {kOutput, kFinal, kCheckpoints}) {
      const gd_tensor& t = *own_tensors(args)[part];
      const char* const data = outputs + (begin_[part] - begin_[kOutput]);
      const size_t bytes = bytes_of(t), end = part == kCheckpoints ? workspace_ : begin_[part + 1];
      if (!poisoned(data + bytes, end - begin_[part] - bytes)) return "a write past the end of an output";
      if (part == kOutput && !all_finite(t.dtype, data, bytes)) return "o is not finite, or not fully written";
      if (part == kOutput || bytes == 0) continue;
      const std::vector<int64_t>& written = part == kFinal ? written_states_ : written_checkpoints_;
      const size_t each = bytes / static_cast<size_t>(t.shape[0]);
      for (int64_t slot = 0; slot < t.shape[0]; ++slot) {
        const char* const state = data + static_cast<size_t>(slot) * each;
        if (std::find(written.begin(), written.end(), slot) != written.end()) {
          if (!all_finite(t.dtype, state, each)) return "a state is not finite, or not fully written";
        } else if (!(part == kFinal && spec_.inplace) && !poisoned(state, each)) {
          return "a state is written to a slot that no index names";
        }
      }
    }
    return "";
  }

 private:
  enum Part { kOffsets, kRead, kWrite, kPlaces, kOutput, kFinal, kCheckpoints, kParts };
  static std::array<gd_tensor*, kParts> own_tensors(gd_forward_args& a) {
    return {&a.in.cu_seqlens,
            &a.in.initial_state_indices,
            &a.final_state_indices,
            &a.checkpoint_indices,
            &a.out,
            &a.final_state,
            &a.checkpoints};
  }

  size_t place(size_t bytes) {
    constexpr size_t kAlign = 256;
    return std::exchange(end_, (end_ + bytes + 2 * kAlign - 1) / kAlign * kAlign);
  }
  void add_indices(Part part, const std::vector<int64_t>& values) {
    gd_tensor& t = *own_tensors(args_)[part];
    t = contiguous(spec_.i64 ? GD_I64 : GD_I32, {static_cast<int64_t>(values.size())});
    begin_[part] = place(bytes_of(t));
    indices_.resize(end_);
    for (size_t i = 0; i < values.size(); ++i) {
      store(indices_.data() + begin_[part], t.dtype, static_cast<int64_t>(i), double(values[i]));
    }
  }

  Case spec_;
  gd_tuning tuning_ = GD_TUNING_INIT;
  gd_forward_args args_{};
  std::vector<int64_t> written_states_, written_checkpoints_;  // slots; negative = none
  std::array<size_t, kParts> begin_{};
  size_t workspace_ = 0, end_ = 0;
  std::vector<char> indices_;
};

// ---- running it ---------------------------------------------------------------------------------------------------

// A stream, memory for the batch it runs, and room for the outputs of two batches on the host.
class Lane {
 public:
  Lane(size_t bytes, size_t outputs_bytes) : memory_(bytes, 0), first_(outputs_bytes), second_(outputs_bytes) {}

  void start(const Batch& batch, int turn) {
    char *const memory = memory_.data(), *const outputs = memory + batch.outputs();
    const auto& indices = batch.indices();
    GD_CUDA_OK(cudaMemcpyAsync(memory, indices.data(), indices.size(), cudaMemcpyHostToDevice, stream_));
    GD_CUDA_OK(cudaMemsetAsync(outputs, kPoison, batch.bytes() - batch.outputs(), stream_));
    gd_forward_args args = batch.over(memory);
    if (batch.spec().inplace) {
      const void* const from = std::exchange(args.in.initial_state, args.final_state).data;
      const size_t bytes = bytes_of(args.final_state);
      GD_CUDA_OK(cudaMemcpyAsync(args.final_state.data, from, bytes, cudaMemcpyDeviceToDevice, stream_));
    }
    args.exec.stream = stream_;
    if (gd_forward(&args) != GD_OK) throw std::runtime_error(gd_last_error());
    GD_CUDA_OK(cudaMemcpyAsync(result(turn), outputs, batch.outputs_bytes(), cudaMemcpyDeviceToHost, stream_));
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
  Soak(uint64_t seed, gd_kernels kernels) : seed_(seed), kernels_(kernels), contents_(make_contents()) {}

  bool run(uint64_t batches) {
    size_t bytes = 0, outputs_bytes = 0;
    for (uint64_t number = 0; number <= batches; ++number) {
      const Batch batch(contents_, kernels_, seed_, number);
      bytes = std::max(bytes, batch.bytes());
      outputs_bytes = std::max(outputs_bytes, batch.outputs_bytes());
    }
    Lane lanes[] = {{bytes, outputs_bytes}, {bytes, outputs_bytes}};
    uint64_t number = 0;
    while (number < batches && failures_ < kMostFailures) {
      const Batch pair[] = {{contents_, kernels_, seed_, number}, {contents_, kernels_, seed_, number + 1}};
      const std::string names[] = {name_of(number, pair[0]), name_of(number + 1, pair[1])};
      watchdog_.begin(names[0] + "\n  or " + names[1]);
      for (const int turn : {0, 1}) {
        for (const int i : {0, 1}) lanes[i].start(pair[i ^ turn], turn);
      }
      for (Lane& lane : lanes) lane.finish();
      watchdog_.end();
      for (const int i : {0, 1}) {
        const char* const outputs = lanes[i].result(0);
        const bool equal = std::memcmp(outputs, lanes[1 - i].result(1), pair[i].outputs_bytes()) == 0;
        expect_none(equal ? pair[i].complaint(outputs) : "the two streams' bits differ", names[i]);
      }
      if (number % kJudgeEvery == 0) expect_none(judge(pair[0].spec(), lanes, names[0]), names[0]);
      number += 2;
      if (number % kReportEvery == 0) report(number, "batches");
    }
    report(number, "batches in all");
    return failures_ == 0;
  }

  bool repeat(uint64_t repeats) {
    uint64_t number = 0;  // the first large batch
    const auto rows = [](const Case& c) { return c.total_tokens() * c.Hv; };
    while (rows(Batch(contents_, kernels_, seed_, number).spec()) < kMaxRows / 2) ++number;
    const Batch batch(contents_, kernels_, seed_, number);
    const std::string name = name_of(number, batch);
    std::printf("%s\n", name.c_str());
    Lane lanes[] = {{batch.bytes(), batch.outputs_bytes()}, {batch.bytes(), batch.outputs_bytes()}};
    uint64_t done = 0;
    while (done < repeats && failures_ < kMostFailures) {
      watchdog_.begin(name);
      const int turn = done == 0 ? 0 : 1;  // the first result stays, and all others are compared with it
      for (Lane& lane : lanes) lane.start(batch, turn);
      for (Lane& lane : lanes) lane.finish();
      watchdog_.end();
      for (const Lane& lane : lanes) {
        const bool equal = std::memcmp(lanes[0].result(0), lane.result(turn), batch.outputs_bytes()) == 0;
        expect_none(equal ? "" : "the bits differ from those of the first run", name);
      }
      done += 2;
      if (done % kReportEvery == 0) report(done, "runs");
    }
    expect_none(batch.complaint(lanes[0].result(0)), name);
    expect_none(judge(batch.spec(), lanes, name), name);
    report(done, "runs in all");
    return failures_ == 0;
  }

  std::string current() { return watchdog_.watched(); }

 private:
  static constexpr uint64_t kJudgeEvery = 50, kReportEvery = 500, kMostFailures = 20;

  std::string name_of(uint64_t number, const Batch& batch) const {
    return "batch " + std::to_string(number) + " of seed " + std::to_string(seed_) + ": " + describe(batch.spec());
  }

  void expect_none(const std::string& complaint, const std::string& name) {
    if (complaint.empty()) return;
    ++failures_;
    std::printf("FAILED %s\n  %s\n", name.c_str(), complaint.c_str());
    std::fflush(stdout);
  }

  // A batch of this case with its own contents, on both streams, against the fp64 truth.
  std::string judge(const Case& c, const Lane (&lanes)[2], const std::string& name) {
    Judge judge(c, {.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))});
    const auto outputs_of = [](const gd_forward_args& args) {
      std::vector<char> bytes;
      for (const gd_tensor* t : {&args.out, &args.final_state, &args.checkpoints}) {
        const char* const data = static_cast<const char*>(t->data);
        bytes.insert(bytes.end(), data, data + bytes_of(*t));
      }
      return bytes;
    };
    const auto run = [&](const gd_forward_args& host) -> std::string {
      gd_forward_args args = host;
      args.exec.kernels = kernels_;
      DeviceForward first(args), second(args);
      watchdog_.begin(name + " (judged)");
      std::string error = first.run(lanes[0].stream());
      if (error.empty()) error = second.run(lanes[1].stream());
      GD_CUDA_OK(cudaDeviceSynchronize());
      watchdog_.end();
      if (error.empty()) error = first.download(host);
      const auto bits = outputs_of(host);
      if (error.empty()) error = second.download(host);
      return error.empty() && bits != outputs_of(host) ? "the two streams' bits differ" : error;
    };
    const Judgement judgement = judge.forward(Compute::tensor_cores, run);
    ++judged_;
    if (judgement.worst()) worst_ = std::max(worst_, judgement.worst()->comparison.margin);
    return judgement.ok() ? "" : judgement.text();
  }

  void report(uint64_t done, const char* what) const {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
    std::printf("%llu %s, %llu judged, the worst at %.0f %% of its bound, %llu failed, %.0f s\n",
                static_cast<unsigned long long>(done), what, static_cast<unsigned long long>(judged_), 100 * worst_,
                static_cast<unsigned long long>(failures_), passed.count());
    std::fflush(stdout);
  }

  uint64_t seed_, judged_ = 0, failures_ = 0;
  gd_kernels kernels_;
  double worst_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Contents contents_;
  Watchdog watchdog_;
};

int run_main(const std::vector<std::string>& arguments) {
  uint64_t batches = 10000, seed = 1, repeats = 0, portable = 0;
  if (!read_options(arguments,
                    {{"--batches", &batches}, {"--seed", &seed}, {"--repeat", &repeats}, {"--portable", &portable}})) {
    std::fprintf(stderr, "usage: gpu_soak [--batches 10000 | --repeat 1000] [--seed 1] [--portable 1]\n");
    return 2;
  }
  gd_info info = GD_INFO_INIT;
  if (gd_get_info(&info) != GD_OK || info.cuda_devices == 0) {
    std::fprintf(stderr, "gpu_soak: no CUDA device of compute capability 8.0 or later\n");
    return 2;
  }
  Soak soak(seed, portable ? GD_KERNELS_PORTABLE : GD_KERNELS_AUTO);
  try {
    return (repeats ? soak.repeat(repeats) : soak.run(batches)) ? 0 : 1;
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
    std::fprintf(stderr, "gpu_soak: %s\n", e.what());
    return 1;
  }
}
