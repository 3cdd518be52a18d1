// Bits that must not change: from run to run, with the thread count, with the neighbours in a batch, with the way the
// same data is stored.
#include <cmath>
#include <cstring>

#include "testing/number.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

const Specs kSpecs = {
    "T=300 Hk=2 Hv=4 K=64 V=64 dtype=bf16 every=64",
    "T=300 Hk=2 Hv=6 tiled K=32 V=48 dtype=bf16 every=64",
    "T=200 Hk=1 Hv=2 K=48 V=144 dtype=fp32 gate=raw l2norm beta=logit every=64",
    "T=1500 Hk=1 Hv=1 K=64 V=96 dtype=bf16 every=128",  // fewer heads than threads
    "lengths=130+0+64+700+1 pad=3 Hk=1 Hv=2 K=32 V=64 dtype=fp16 every=64",
};

// Every bit of every output of one operation.
std::string bytes_of(std::initializer_list<const gd_tensor*> tensors) {
  std::string bytes;
  for (const gd_tensor* t : tensors) {
    const auto size = static_cast<size_t>(element_bytes(t->dtype));
    for_each_element(*t, [&](int64_t offset, int64_t) {
      bytes.append(static_cast<const char*>(t->data) + offset * int64_t(size), size);
    });
  }
  return bytes;
}

std::string forward_bits(Problem& p, const Exec& exec) {
  p.reset();
  EXPECT_EQ(run_forward(p.forward, exec), "");
  return bytes_of({&p.forward.out, &p.forward.final_state, &p.forward.checkpoints});
}

std::string backward_bits(Problem& p, const Exec& exec, bool from_saved) {
  p.reset();
  Saved saved;
  if (from_saved) {
    EXPECT_EQ(run_forward(p.forward, exec, &saved), "");
  }
  p.reset();
  EXPECT_EQ(run_backward(p.backward, exec, from_saved ? &saved : nullptr), "");
  const gd_backward_args& g = p.backward;
  return bytes_of({&g.dq, &g.dk, &g.dv, &g.dg, &g.dbeta, &g.dA_log, &g.d_dt_bias, &g.d_initial_state});
}

std::string recurrent_bits(Problem& p, const Exec& exec) {
  p.reset();
  EXPECT_EQ(run_recurrent(p.recurrent, exec), "");
  return bytes_of({&p.recurrent.out, &p.recurrent.final_state});
}

TEST(Invariance, RunsAndThreadCounts) {
  for (const std::string& spec : selected(kSpecs)) {
    Problem p(parse_case(spec));
    for (const gd_isa isa : usable_isas()) {
      SCOPED_TRACE(std::string(gd_isa_name(isa)) + " " + spec);
      const Exec alone{.isa = isa, .pool = nullptr, .threads = 0};
      const std::string forward = forward_bits(p, alone), backward = backward_bits(p, alone, false),
                        saved = backward_bits(p, alone, true), recurrent = recurrent_bits(p, alone);
      EXPECT_EQ(saved == backward, true) << "backward from saved and recomputed differ";
      for (const int threads : {1, 2, 3, 8}) {
        const Pool pool(threads);
        const Exec exec{.isa = isa, .pool = pool, .threads = threads};
        EXPECT_TRUE(forward == forward_bits(p, exec)) << "forward, threads " << threads;
        EXPECT_TRUE(backward == backward_bits(p, exec, false)) << "backward, threads " << threads;
        EXPECT_TRUE(saved == backward_bits(p, exec, true)) << "backward from saved, threads " << threads;
        EXPECT_TRUE(recurrent == recurrent_bits(p, exec)) << "recurrent, threads " << threads;
      }
    }
  }
}

// Tokens [begin, begin + length) of a packed problem as a dense problem of their own.
gd_tensor tokens(gd_tensor t, int64_t begin, int64_t length) {
  t.data = static_cast<char*>(t.data) + begin * t.stride[1] * element_bytes(t.dtype);
  t.shape[1] = length;
  return t;
}
gd_tensor sequence_state(gd_tensor t, int64_t n) {
  t.data = static_cast<char*>(t.data) + n * t.stride[0] * element_bytes(t.dtype);
  t.shape[0] = 1;
  return t;
}

TEST(Invariance, BatchNeighbours) {
  for (const std::string& dtype : kDtypeSpecs) {
    const std::string spec = "lengths=130+1+64+300 Hk=2 Hv=4 K=32 V=64 l2norm " + dtype;
    Problem pack(parse_case(spec)), alone(parse_case(spec));
    const Pool pool(3);
    for (const gd_isa isa : usable_isas()) {
      SCOPED_TRACE(std::string(gd_isa_name(isa)) + " " + spec);
      const Exec exec{.isa = isa, .pool = pool, .threads = 3};
      pack.reset();
      ASSERT_EQ(run_forward(pack.forward, exec), "");
      ASSERT_EQ(run_backward(pack.backward, exec), "");
      const auto spans = sequence_spans(pack.forward.in);
      alone.reset();
      for (size_t n = 0; n < spans.size(); ++n) {
        gd_forward_args f = alone.forward;
        gd_backward_args b = alone.backward;
        f.in.cu_seqlens = b.in.cu_seqlens = {};
        const auto cut = [&](gd_tensor& t) { t = tokens(t, spans[n].begin, spans[n].length); };
        for (gd_inputs* in : {&f.in, &b.in}) {
          for (gd_tensor* t : {&in->q, &in->k, &in->v, &in->g, &in->beta}) cut(*t);
          in->initial_state = sequence_state(in->initial_state, int64_t(n));
        }
        for (gd_tensor* t : {&f.out, &b.do_, &b.dq, &b.dk, &b.dv, &b.dg, &b.dbeta}) cut(*t);
        for (gd_tensor* t : {&f.final_state, &b.dht, &b.d_initial_state}) *t = sequence_state(*t, int64_t(n));
        ASSERT_EQ(run_forward(f, exec), "");
        ASSERT_EQ(run_backward(b, exec), "");
      }
      EXPECT_TRUE(bytes_of({&pack.forward.out, &pack.forward.final_state}) ==
                  bytes_of({&alone.forward.out, &alone.forward.final_state}));
      const gd_backward_args &x = pack.backward, &y = alone.backward;
      EXPECT_TRUE(bytes_of({&x.dq, &x.dk, &x.dv, &x.dg, &x.dbeta, &x.d_initial_state}) ==
                  bytes_of({&y.dq, &y.dk, &y.dv, &y.dg, &y.dbeta, &y.d_initial_state}));
    }
  }
}

// Strides, pools, offsets of the other width and the final state in place move data, not results.
TEST(Invariance, Storage) {
  for (const std::string& dtype : kDtypeSpecs) {
    const std::string spec = "lengths=70+64+129 pad=4 Hk=1 Hv=2 K=32 V=48 " + dtype;
    Problem plain(parse_case(spec)), strided(parse_case(spec + " strided i64"));
    for (const gd_isa isa : usable_isas()) {
      SCOPED_TRACE(std::string(gd_isa_name(isa)) + " " + spec);
      const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
      EXPECT_TRUE(forward_bits(plain, exec) == forward_bits(strided, exec));
      EXPECT_TRUE(backward_bits(plain, exec, false) == backward_bits(strided, exec, false));
      EXPECT_TRUE(recurrent_bits(plain, exec) == recurrent_bits(strided, exec));
    }
  }
}

TEST(Invariance, InPlaceGivesTheSameBits) {
  const std::string spec = "B=5 T=70 Hk=1 Hv=2 K=32 V=48 pool";
  Problem apart(parse_case(spec)), inplace(parse_case(spec + " inplace"));
  for (const gd_isa isa : usable_isas()) {
    const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
    for (const bool recurrent : {false, true}) {
      apart.reset(), inplace.reset();
      ASSERT_EQ(recurrent ? run_recurrent(apart.recurrent, exec) : run_forward(apart.forward, exec), "");
      ASSERT_EQ(recurrent ? run_recurrent(inplace.recurrent, exec) : run_forward(inplace.forward, exec), "");
      EXPECT_TRUE(bytes_of({&apart.forward.out}) == bytes_of({&inplace.forward.out}));
      for (int64_t n = 0; n < 5; ++n) {
        const int64_t from = index_at(apart.forward.final_state_indices, n),
                      to = index_at(inplace.forward.final_state_indices, n);
        if (from < 0) continue;
        const gd_tensor a = sequence_state(apart.forward.final_state, from),
                        b = sequence_state(inplace.forward.final_state, to);
        EXPECT_TRUE(bytes_of({&a}) == bytes_of({&b})) << gd_isa_name(isa) << " sequence " << n;
      }
    }
  }
}

// What a gate of -inf (or so low that e^g is nothing) lies between has no influence at all, however large it is.
TEST(Invariance, ResetsForgetEverything) {
  constexpr int64_t kReset = 37;  // inside a chunk
  for (const std::string& dtype : kDtypeSpecs) {
    Problem small(parse_case("T=150 Hk=1 Hv=2 K=32 V=32 " + dtype)),
        large(parse_case("T=150 Hk=1 Hv=2 K=32 V=32 " + dtype));
    for (const double g : {-HUGE_VAL, -3e38, -200.0}) {
      for (Problem* p : {&small, &large}) {
        const double size = p == &small ? 1 : 1e4;  // fits fp16
        const gd_inputs& in = p->forward.in;
        for_each_element(in.g, [&](int64_t offset, int64_t i) {
          if (i / 2 == kReset) store(in.g.data, in.g.dtype, offset, g);
        });
        for_each_element(in.v, [&](int64_t offset, int64_t i) {
          if (i < kReset * 2 * 32) store(in.v.data, in.v.dtype, offset, size * double(i % 7 - 3));
        });
        const gd_tensor& h0 = in.initial_state;
        for_each_element(h0, [&](int64_t offset, int64_t i) {
          store(h0.data, h0.dtype, offset, size * size * size * double(i % 5 - 2));
        });
      }
      for (const gd_isa isa : usable_isas()) {
        SCOPED_TRACE(std::string(gd_isa_name(isa)) + " " + dtype + " g=" + std::to_string(g));
        const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
        for (const bool recurrent : {false, true}) {
          std::string bits[2];
          for (Problem* p : {&small, &large}) {
            p->reset();
            ASSERT_EQ(recurrent ? run_recurrent(p->recurrent, exec) : run_forward(p->forward, exec), "");
            const gd_tensor after = tokens(p->forward.out, kReset, 150 - kReset);
            bits[p == &large] = bytes_of({&after, &p->forward.final_state});
          }
          EXPECT_TRUE(bits[0] == bits[1]) << (recurrent ? "recurrent" : "forward");
        }
        // Nor does what follows a reset have any on what precedes it.
        small.reset();
        gd_backward_args args = small.backward;
        for (gd_tensor* t : {&args.in.q, &args.in.k, &args.in.v, &args.in.g, &args.in.beta, &args.do_, &args.dq,
                             &args.dk, &args.dv, &args.dg, &args.dbeta}) {
          *t = tokens(*t, kReset, 150 - kReset);
        }
        ASSERT_EQ(run_backward(args, exec), "");
        for (const double value : to_doubles(args.d_initial_state)) ASSERT_EQ(value, 0);
      }
    }
  }
}

// A call whose final state is fed to the next one ends where one call over all tokens ends.
TEST(Invariance, ChainedCalls) {
  Problem whole(parse_case("T=256 Hk=1 Hv=2 K=32 V=32 dtype=bf16")),
      parts(parse_case("T=256 Hk=1 Hv=2 K=32 V=32 dtype=bf16"));
  for (const gd_isa isa : usable_isas()) {
    const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
    whole.reset(), parts.reset();
    ASSERT_EQ(run_forward(whole.forward, exec), "");
    gd_forward_args args = parts.forward;
    for (const auto& [begin, length] : {std::pair<int64_t, int64_t>{0, 64}, {64, 128}, {192, 64}}) {
      args = parts.forward;
      for (gd_tensor* t : {&args.in.q, &args.in.k, &args.in.v, &args.in.g, &args.in.beta, &args.out}) {
        *t = tokens(*t, begin, length);
      }
      if (begin) args.in.initial_state = args.final_state;  // in place
      ASSERT_EQ(run_forward(args, exec), "");
    }
    EXPECT_TRUE(bytes_of({&whole.forward.out, &whole.forward.final_state}) ==
                bytes_of({&parts.forward.out, &parts.forward.final_state}))
        << gd_isa_name(isa);
  }
}

}  // namespace
}  // namespace gatedelta::testing
