#include "testing/conv1d.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "testing/compare.hpp"
#include "testing/number.hpp"
#include "testing/tolerance.hpp"

namespace gatedelta::testing {

// ---- buffers ------------------------------------------------------------------------------------------------------

namespace {

enum Stream : uint64_t { sX = 40, sWeight, sBias, sState, sDy, sDfinal, sSlots, sAccept };

int64_t extent(const gd_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.stride[i];
  }
  return last + 1;
}

int64_t at(const gd_tensor& t, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int i = 0;
  for (const int64_t each : index) offset += each * t.stride[i++];
  return offset;
}
double value_at(const gd_tensor& t, std::initializer_list<int64_t> index) {
  return load(t.data, t.dtype, at(t, index));
}

// The number that is left after a store in this type.
double rounded(double x, int32_t dtype) {
  float bits[2];
  store(bits, dtype, 0, x);
  return load(bits, dtype, 0);
}

}  // namespace

// `order` lists the axes from the outermost in memory to the innermost.
gd_tensor ConvProblem::make(const std::string& name, gd_dtype dtype, const std::vector<int64_t>& shape,
                            const std::vector<int>& order) {
  Entry& e = entries_.emplace_back();
  e.name = name;
  gd_tensor& t = e.tensor;
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  int64_t step = spec.strided && shape.size() == 1 ? 2 : 1;
  for (size_t i = shape.size(); i-- > 0;) {
    const int axis = order.empty() ? static_cast<int>(i) : order[i];
    t.stride[axis] = step;
    step *= std::max<int64_t>(shape[static_cast<size_t>(axis)], 1);
    if (spec.strided) step += 8;
  }
  const auto size = static_cast<size_t>(element_bytes(dtype));
  e.buffer = Buffer(static_cast<size_t>(extent(t)) * size, spec.strided ? size : 0);
  t.data = e.buffer.data();
  e.written.assign(static_cast<size_t>(extent(t)), false);
  return t;
}

gd_tensor ConvProblem::make_indices(const std::string& name, const std::vector<int64_t>& values) {
  Entry& e = entries_.emplace_back();
  e.name = name;
  gd_tensor& t = e.tensor;
  t.dtype = spec.i64 ? GD_I64 : GD_I32;
  t.rank = 1;
  t.shape[0] = static_cast<int64_t>(values.size());
  t.stride[0] = 1;
  e.buffer = Buffer(values.size() * static_cast<size_t>(element_bytes(t.dtype)));
  t.data = e.buffer.data();
  e.written.assign(values.size(), false);
  for (size_t i = 0; i < values.size(); ++i)
    store(t.data, t.dtype, static_cast<int64_t>(i), static_cast<double>(values[i]));
  return t;
}

void ConvProblem::fill(const gd_tensor& t, uint64_t stream) {
  for_each_element(t, [&](int64_t offset, int64_t i) {
    store(t.data, t.dtype, offset, normal(spec.seed, stream, static_cast<uint64_t>(i)));
  });
}

ConvProblem::Entry& ConvProblem::entry(const gd_tensor& t) {
  return *std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.tensor.data == t.data; });
}

namespace {

// Slot of each sequence, -1 for some, all different. A pool has twice as many slots as sequences.
std::vector<int64_t> choose_slots(const ConvCase& c, uint64_t stream, uint64_t without) {
  const int64_t N = c.sequences(), slots = 2 * N + 2, first = c.null_slot ? 1 : 0;
  std::vector<int64_t> all(static_cast<size_t>(slots - first));
  std::iota(all.begin(), all.end(), first);
  for (size_t i = all.size(); i > 1; --i)
    std::swap(all[i - 1], all[static_cast<size_t>(uniform(c.seed, stream, i) * static_cast<double>(i))]);
  all.resize(static_cast<size_t>(N));
  for (size_t n = 0; n < all.size(); ++n) {
    if (n % 5 == without || n % 5 == 4) all[n] = c.null_slot ? 0 : -1;  // every fifth sequence is a padded row
  }
  return all;
}

}  // namespace

ConvProblem::ConvProblem(const ConvCase& c) : spec(c) {
  const int64_t B = c.B, T = c.tokens(), N = c.sequences(), D = c.D, W = c.W;
  if (!c.lengths.empty() && B != 1) throw std::invalid_argument("lengths need B = 1");
  const int64_t least = c.drafts ? std::max<int64_t>(W - 1, W - 2 + c.longest()) : W - 1;
  const int64_t S = c.S ? c.S : least, final_S = c.inplace ? S : c.final_S ? c.final_S : c.S ? c.S : least;
  const std::vector<int> rows = c.channel_major ? std::vector{0, 2, 1} : std::vector<int>{};
  const std::vector<int> columns = c.state_tokens_first ? std::vector{0, 2, 1} : std::vector<int>{};
  const gd_dtype odtype = c.odtype == GD_DTYPE_NONE ? c.dtype : c.odtype;

  gd_conv1d_inputs in{};
  in.x = make("x", c.dtype, {B, T, D}, rows);
  in.weight = make("weight", c.wdtype, {D, W});
  if (c.bias) in.bias = make("bias", c.wdtype, {D});
  fill(in.x, sX);
  fill(in.weight, sWeight);
  if (c.bias) fill(in.bias, sBias);
  in.activation = c.silu ? GD_CONV1D_SILU : GD_CONV1D_LINEAR;
  if (!c.lengths.empty()) {
    std::vector<int64_t> offsets = {0};
    for (const int64_t length : c.lengths) offsets.push_back(offsets.back() + length);
    in.cu_seqlens = make_indices("cu_seqlens", offsets);
    for (int64_t t = offsets.back(); t < T; ++t)
      for (int64_t d = 0; d < D; ++d) store(in.x.data, in.x.dtype, at(in.x, {0, t, d}), std::nan(""));
  }

  read_slots_.assign(static_cast<size_t>(N), -1);
  write_slots_ = read_slots_;
  const int64_t slots = c.pool ? 2 * N + 2 : N;
  if (c.pool) {
    read_slots_ = choose_slots(c, sSlots, 3);
    write_slots_ = c.inplace ? read_slots_ : choose_slots(c, sSlots + 100, 2);
  } else {
    if (c.h0) std::iota(read_slots_.begin(), read_slots_.end(), 0);
    if (c.ht) std::iota(write_slots_.begin(), write_slots_.end(), 0);
  }
  if (c.h0) {
    in.initial_state = make("initial_state", c.state, {slots, D, S}, columns);
    if (c.pool) in.initial_state_indices = make_indices("initial_state_indices", read_slots_);
  }
  if (c.drafts) {
    for (int64_t n = 0; n < N; ++n) {
      const double u = uniform(c.seed, sAccept, static_cast<uint64_t>(n));
      accepted_.push_back(1 + static_cast<int64_t>(u * static_cast<double>(S - W + 2)));
    }
  }
  if (c.pool && (c.h0 || c.ht)) in.first_slot = c.null_slot ? 1 : 0;
  const int64_t first = in.first_slot;
  for (int64_t& slot : read_slots_) slot = slot < first || !c.h0 ? -1 : slot;
  for (int64_t& slot : write_slots_) slot = slot < first || !c.ht ? -1 : slot;
  // The columns of used slots that hold something.
  for (int64_t n = 0; c.h0 && n < N; ++n) {
    const int64_t slot = read_slots_[static_cast<size_t>(n)];
    if (slot < 0) continue;
    const int64_t end = c.drafts ? W - 2 + accepted_[static_cast<size_t>(n)] : S;
    for (int64_t d = 0; d < D; ++d)
      for (int64_t s = c.drafts ? end - (W - 1) : 0; s < end; ++s)
        store(in.initial_state.data, c.state, at(in.initial_state, {slot, d, s}),
              normal(c.seed, sState, static_cast<uint64_t>((slot * D + d) * S + s)));
  }

  forward.struct_size = sizeof forward;
  forward.in = in;
  forward.out = make("y", odtype, {B, T, D}, rows);
  if (c.ht) {
    if (c.inplace) {
      forward.final_state = in.initial_state;
      forward.final_state_indices = in.initial_state_indices;
    } else {
      forward.final_state = make("final_state", c.state, {slots, D, final_S}, columns);
      if (c.pool)
        forward.final_state_indices = make_indices("final_state_indices", [&] {
          auto indices = write_slots_;
          if (c.null_slot) std::replace(indices.begin(), indices.end(), int64_t{-1}, int64_t{0});
          return indices;
        }());
    }
  }
  if (c.drafts) forward.previous_accept_lengths = make_indices("previous_accept_lengths", accepted_);
  if (c.steps) forward.step_states = make("step_states", c.state, {B, T, D, W - 1});
  // A padded row's tokens are not read.
  for (int64_t n = 0; c.pool && c.h0 && c.ht && n < N; ++n) {
    if (read_slots_[static_cast<size_t>(n)] >= 0 || write_slots_[static_cast<size_t>(n)] >= 0) continue;
    const int64_t begin = c.lengths.empty() ? 0 : static_cast<int64_t>(value_at(in.cu_seqlens, {n}));
    const int64_t end = c.lengths.empty() ? T : static_cast<int64_t>(value_at(in.cu_seqlens, {n + 1}));
    for (int64_t t = begin; t < end; ++t)
      for (int64_t d = 0; d < D; ++d)
        store(in.x.data, in.x.dtype, at(in.x, {c.lengths.empty() ? n : 0, t, d}), std::nan(""));
  }

  backward.struct_size = sizeof backward;
  backward.in = in;
  if (!in.initial_state_indices.dtype) backward.in.first_slot = 0;
  backward.dy = make("d_y", odtype, {B, T, D}, rows);
  fill(backward.dy, sDy);
  if (c.ht) {
    backward.dht = make("dht", c.state, {N, D, final_S}, columns);
    fill(backward.dht, sDfinal);
  }
  backward.dx = make("dx", c.dtype, {B, T, D}, rows);
  backward.dweight = make("dweight", c.wdtype, {D, W});
  backward.dbias = make("dbias", c.wdtype, {D});
  if (c.h0) backward.d_initial_state = make("d_initial_state", c.state, {N, D, S}, columns);
  if (!c.lengths.empty()) {
    for (int64_t t = T - c.pad; t < T; ++t)
      for (int64_t d = 0; d < D; ++d)
        store(backward.dy.data, backward.dy.dtype, at(backward.dy, {0, t, d}), std::nan(""));
  }
  for (Entry& e : entries_) e.pristine.assign(e.buffer.data(), e.buffer.data() + e.buffer.size());
}

void ConvProblem::reset() {
  for (Entry& e : entries_) {
    std::copy(e.pristine.begin(), e.pristine.end(), e.buffer.data());
    std::fill(e.written.begin(), e.written.end(), false);
  }
}

// ---- truth --------------------------------------------------------------------------------------------------------

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Span {
  int64_t batch, begin, length;
};
Span span_of(const gd_conv1d_inputs& in, int64_t n) {
  if (!in.cu_seqlens.dtype) return {n, 0, in.x.shape[1]};
  const auto begin = static_cast<int64_t>(value_at(in.cu_seqlens, {n}));
  return {0, begin, static_cast<int64_t>(value_at(in.cu_seqlens, {n + 1})) - begin};
}

std::string check_close(const std::string& name, const gd_tensor& t, const std::vector<double>& truth) {
  const Tolerance bound = tolerance(Quantity::o, Compute::fp32, static_cast<gd_dtype>(t.dtype), Case{});
  const Comparison result = compare(to_doubles(t), truth, {1, 1, static_cast<int64_t>(truth.size())}, bound);
  return result.ok ? "" : name + ": " + result.text() + "\n";
}

}  // namespace

std::string ConvProblem::judge_forward(const std::function<std::string(const gd_conv1d_args&)>& run) {
  reset();
  const gd_conv1d_inputs& in = forward.in;
  const int64_t N = spec.sequences(), D = spec.D, W = spec.W;
  std::vector<double> y(static_cast<size_t>(element_count(in.x)), 0.0);
  struct Copy {
    const gd_tensor* tensor;
    int64_t offset;
    double value;
  };
  std::vector<Copy> copies;  // what states get: inputs, rounded to their type
  for (int64_t n = 0; n < N; ++n) {
    const int64_t from = read_slots_[static_cast<size_t>(n)], to = write_slots_[static_cast<size_t>(n)];
    if (in.initial_state_indices.dtype && forward.final_state_indices.dtype && from < 0 && to < 0) continue;
    const Span span = span_of(in, n);
    const int64_t S = spec.h0 ? in.initial_state.shape[2] : 0;
    const int64_t end = spec.drafts ? W - 2 + accepted_[static_cast<size_t>(n)] : S;
    for (int64_t d = 0; d < D; ++d) {
      const auto input = [&](int64_t p) {
        if (p >= 0) return value_at(in.x, {span.batch, span.begin + p, d});
        return from >= 0 && end + p >= 0 ? value_at(in.initial_state, {from, d, end + p}) : 0.0;
      };
      for (int64_t t = 0; t < span.length; ++t) {
        double z = spec.bias ? value_at(in.bias, {d}) : 0.0;
        for (int64_t i = 0; i < W; ++i) z += value_at(in.weight, {d, i}) * input(t - W + 1 + i);
        y[static_cast<size_t>((span.batch * spec.tokens() + span.begin + t) * D + d)] = spec.silu ? z * sigmoid(z) : z;
        for (int64_t i = 0; spec.steps && i < W - 1; ++i)
          copies.push_back({&forward.step_states, at(forward.step_states, {span.batch, span.begin + t, d, i}),
                            input(t - W + 2 + i)});
      }
      if (to < 0) continue;
      const int64_t final_S = forward.final_state.shape[2];
      if (spec.drafts && span.length > 0) {
        for (int64_t s = 0; s < W - 2 + span.length; ++s)
          copies.push_back({&forward.final_state, at(forward.final_state, {to, d, s}), input(s - (W - 2))});
      } else if (!(spec.inplace && span.length == 0)) {
        const auto column = [&](int64_t p) {  // of a draft window's state that is copied as it is
          return from >= 0 && S + p >= 0 ? value_at(in.initial_state, {from, d, S + p}) : 0.0;
        };
        for (int64_t s = 0; s < final_S; ++s) {
          const int64_t p = span.length - final_S + s;
          copies.push_back(
              {&forward.final_state, at(forward.final_state, {to, d, s}), spec.drafts && p < 0 ? column(p) : input(p)});
        }
      }
    }
  }
  if (const std::string error = run(forward); !error.empty()) return error + "\n";
  std::string wrong;
  if (forward.out.dtype) {
    for_each_element(forward.out, [&](int64_t offset, int64_t) { entry(forward.out).written[offset] = true; });
    wrong += check_close("y", forward.out, y);
  }
  int64_t different = 0;
  for (const Copy& copy : copies) {
    entry(*copy.tensor).written[static_cast<size_t>(copy.offset)] = true;
    const double got = load(copy.tensor->data, copy.tensor->dtype, copy.offset);
    const double expected = rounded(copy.value, copy.tensor->dtype);
    if (got == expected || (std::isnan(got) && std::isnan(expected))) continue;
    if (different++ == 0)
      wrong += entry(*copy.tensor).name + " at offset " + std::to_string(copy.offset) + ": " + std::to_string(got) +
               " instead of " + std::to_string(expected) + "\n";
  }
  if (different > 1) wrong += std::to_string(different) + " numbers of states are wrong\n";
  return wrong + damage({&forward.out, &forward.final_state, &forward.step_states});
}

std::string ConvProblem::judge_backward(const std::function<std::string(const gd_conv1d_backward_args&)>& run) {
  reset();
  const gd_conv1d_inputs& in = backward.in;
  const int64_t N = spec.sequences(), D = spec.D, W = spec.W;
  std::vector<double> dx(static_cast<size_t>(element_count(in.x)), 0.0);
  std::vector<double> dw(static_cast<size_t>(D * W), 0.0), db(static_cast<size_t>(D), 0.0);
  std::vector<double> dh(static_cast<size_t>(element_count(backward.d_initial_state)), 0.0);
  const int64_t S = spec.h0 ? in.initial_state.shape[2] : 0;
  for (int64_t n = 0; n < N; ++n) {
    const Span span = span_of(in, n);
    const int64_t from = spec.h0 ? read_slots_[static_cast<size_t>(n)] : -1;
    for (int64_t d = 0; d < D; ++d) {
      const auto input = [&](int64_t p) {
        if (p >= 0) return value_at(in.x, {span.batch, span.begin + p, d});
        return from >= 0 && S + p >= 0 ? value_at(in.initial_state, {from, d, S + p}) : 0.0;
      };
      const auto add = [&](int64_t p, double gradient) {
        if (p >= 0) {
          dx[static_cast<size_t>((span.batch * spec.tokens() + span.begin + p) * D + d)] += gradient;
        } else if (S + p >= 0 && !dh.empty()) {
          dh[static_cast<size_t>((n * D + d) * S + S + p)] += gradient;
        }
      };
      for (int64_t t = 0; t < span.length; ++t) {
        double z = spec.bias ? value_at(in.bias, {d}) : 0.0;
        for (int64_t i = 0; i < W; ++i) z += value_at(in.weight, {d, i}) * input(t - W + 1 + i);
        const double s = sigmoid(z);
        const double dz =
            value_at(backward.dy, {span.batch, span.begin + t, d}) * (spec.silu ? s * (1 + z * (1 - s)) : 1);
        for (int64_t i = 0; i < W; ++i) {
          dw[static_cast<size_t>(d * W + i)] += dz * input(t - W + 1 + i);
          add(t - W + 1 + i, dz * value_at(in.weight, {d, i}));
        }
        db[static_cast<size_t>(d)] += dz;
      }
      if (!spec.ht) continue;
      const int64_t final_S = backward.dht.shape[2];
      for (int64_t s = 0; s < final_S; ++s) add(span.length - final_S + s, value_at(backward.dht, {n, d, s}));
    }
  }
  if (const std::string error = run(backward); !error.empty()) return error + "\n";
  std::string wrong;
  const std::pair<const gd_tensor*, const std::vector<double>*> gradients[] = {
      {&backward.dx, &dx}, {&backward.dweight, &dw}, {&backward.dbias, &db}, {&backward.d_initial_state, &dh}};
  std::vector<const gd_tensor*> outputs;
  for (const auto& [tensor, truth] : gradients) {
    if (!tensor->dtype) continue;
    outputs.push_back(tensor);
    Entry& e = entry(*tensor);
    for_each_element(*tensor, [&](int64_t offset, int64_t) { e.written[static_cast<size_t>(offset)] = true; });
    wrong += check_close(e.name, *tensor, *truth);
  }
  return wrong + damage(outputs);
}

// Lists writes to places that must not be written.
std::string ConvProblem::damage(const std::vector<const gd_tensor*>& outputs) const {
  std::string wrong;
  for (const Entry& e : entries_) {
    if (!e.buffer.guards_intact()) wrong += e.name + ": written outside of the buffer\n";
    const bool is_output = std::any_of(outputs.begin(), outputs.end(),
                                       [&](const gd_tensor* t) { return t->dtype && t->data == e.tensor.data; });
    const auto size = static_cast<size_t>(element_bytes(e.tensor.dtype));
    for (size_t i = 0; i < e.written.size(); ++i) {
      if (is_output && e.written[i]) continue;
      if (std::memcmp(e.buffer.data() + i * size, e.pristine.data() + i * size, size) == 0) continue;
      wrong += e.name + ": written at offset " + std::to_string(i) + ", where nothing must be\n";
      break;
    }
  }
  return wrong;
}

namespace {

template <class Args>
std::string run_on_cpu(Args& args, gd_isa isa, gd_thread_pool* pool, gd_status (*query)(const Args*, size_t*),
                       gd_status (*call)(const Args*)) {
  args.exec = {};
  args.exec.isa = isa;
  if (pool) {
    args.exec.parallel_for = gd_thread_pool_parallel_for;
    args.exec.parallel_for_context = pool;
    args.exec.num_threads = gd_thread_pool_size(pool);
  }
  if (query(&args, &args.exec.workspace_bytes) != GD_OK) return std::string("workspace query: ") + gd_last_error();
  Buffer workspace(args.exec.workspace_bytes);
  args.exec.workspace = workspace.data();
  const gd_status status = call(&args);
  if (status != GD_OK) return std::string(gd_status_name(status)) + ": " + gd_last_error();
  return workspace.guards_intact() ? "" : "written outside of the workspace";
}

}  // namespace

std::string run_conv1d(gd_conv1d_args args, gd_isa isa, gd_thread_pool* pool) {
  return run_on_cpu(args, isa, pool, gd_conv1d_workspace, gd_conv1d);
}
std::string run_conv1d_backward(gd_conv1d_backward_args args, gd_isa isa, gd_thread_pool* pool) {
  return run_on_cpu(args, isa, pool, gd_conv1d_backward_workspace, gd_conv1d_backward);
}

}  // namespace gatedelta::testing
