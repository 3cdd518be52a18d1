// The generator, the comparator and the tolerance table: what they promise, and that they can fail.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "testing/compare.hpp"
#include "testing/generator.hpp"
#include "testing/number.hpp"
#include "testing/reference.hpp"
#include "testing/tolerance.hpp"

namespace gatedelta::testing {
namespace {

TEST(Number, SixteenBitTypesRoundTripAndRoundToEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (!std::isnan(decode_f16(half))) {
      EXPECT_EQ(encode_f16(decode_f16(half)), half);
    }
    if (!std::isnan(decode_bf16(half))) {
      EXPECT_EQ(encode_bf16(decode_bf16(half)), half);
    }
  }
  EXPECT_EQ(decode_f16(0x3c00), 1);
  EXPECT_EQ(decode_f16(0x0001), 0x1p-24);
  EXPECT_EQ(decode_f16(0x7bff), 65504);
  EXPECT_EQ(encode_f16(1 + 0x1p-11), 0x3c00);  // ties to even, down and up
  EXPECT_EQ(encode_f16(1 + 3 * 0x1p-11), 0x3c02);
  EXPECT_EQ(encode_f16(65519), 0x7bff);
  EXPECT_EQ(encode_f16(65520), 0x7c00);
  EXPECT_EQ(encode_f16(0x1p-25), 0);
  EXPECT_EQ(encode_f16(0x1.8p-25), 1);
  EXPECT_EQ(encode_bf16(1 + 0x1p-8), 0x3f80);
  EXPECT_EQ(encode_bf16(1 + 3 * 0x1p-8), 0x3f82);
  EXPECT_TRUE(std::isnan(decode_bf16(encode_bf16(NAN))));
  EXPECT_TRUE(std::isnan(decode_f16(encode_f16(NAN))));
}

TEST(Random, HasTheRightMomentsAndNoMemory) {
  constexpr int n = 200000;
  double mean = 0, variance = 0, lag = 0;
  for (int i = 0; i < n; ++i) {
    const double x = normal(7, 3, i);
    mean += x / n;
    variance += x * x / n;
    lag += x * normal(7, 4, i) / n + x * normal(7, 3, i + 1) / n + x * normal(8, 3, i) / n;
  }
  EXPECT_NEAR(mean, 0, 0.01);
  EXPECT_NEAR(variance, 1, 0.02);
  EXPECT_NEAR(lag, 0, 0.02);
  EXPECT_EQ(normal(7, 3, 5), normal(7, 3, 5));
  // Published results name their inputs by seed: the numbers behind a seed must never change.
  EXPECT_EQ(uniform(1, 2, 3), 5703754341190952 * 0x1p-53);
  EXPECT_EQ(normal(1, 0, 0), 50638.0 / 65536);
  EXPECT_EQ(normal(2, 5, 1000000), 180836.0 / 65536);
}

TEST(Spec, RoundTrips) {
  for (const char* text :
       {"T=130 Hk=2 Hv=4 K=64 V=32 dtype=bf16 gate=strong beta=two keys=correlated l2norm seed=9",
        "lengths=3x64+0+130 pad=5 Hk=1 Hv=8 K=16 V=256 dtype=fp16 state=bf16 layout=vk pool inplace i64 strided",
        "B=3 T=8 Hk=1 Hv=1 K=16 V=16 dtype=fp32 odtype=bf16 gdtype=fp16 accept steps=pool scale=0.5 h0=0 ht=0 "
        "every=64",
        "lengths=3+1 Hk=1 Hv=1 K=16 V=16 dtype=fp32 pool first_slot=2 picked=4 steps=rows"}) {
    const Case c = parse_case(text);
    EXPECT_EQ(describe(parse_case(describe(c))), describe(c));
  }
  const Case c = parse_case("lengths=2x3+1 pad=4");
  EXPECT_EQ(c.sequences(), 3);
  EXPECT_EQ(c.total_tokens(), 11);
  for (const char* bad :
       {"T=x", "T=", "dtype=fp8", "nonsense=1", "l2norm=2", "lengths=a", "scale=big", "T=9999999999999999999"}) {
    EXPECT_THROW(parse_case(bad), std::invalid_argument) << bad;
  }
  for (const char* bad :
       {"Hk=2 Hv=3", "T=-1", "pad=3", "lengths=1 B=2", "inplace h0=0", "K=0", "lengths=-4",
        "T=1000000000000 Hv=64 K=256", "first_slot=1", "picked=2 pool h0=0", "steps=rows", "pool picked=-1"}) {
    EXPECT_THROW(Problem{parse_case(bad)}, std::invalid_argument) << bad;
  }
}

TEST(Generator, IsWhatItSays) {
  const Problem p(parse_case("lengths=100+28 pad=7 Hk=2 Hv=8 K=16 V=32 dtype=bf16 pool"));
  const gd_inputs& in = p.forward.in;
  const auto k = to_doubles(in.k), g = to_doubles(in.g);
  for (int64_t row = 0; row < 128 * 2; ++row) {
    double length = 0;
    for (int64_t i = 0; i < 16; ++i) length += k[row * 16 + i] * k[row * 16 + i];
    EXPECT_NEAR(length, 1, 0.01);
  }
  for (const gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta, &p.backward.do_}) {
    const auto values = to_doubles(*t);
    const int64_t per_token = element_count(*t) / 135;
    for (int64_t i = 0; i < element_count(*t); ++i) EXPECT_EQ(std::isnan(values[i]), i / per_token >= 128);
  }
  for (int64_t i = 0; i < 128 * 8; ++i) EXPECT_EQ(g[i] == 0, i % 4 == 3);
  const auto states = to_doubles(in.initial_state);  // 7 slots, of which one is read
  int nan = 0;
  for (double value : states) nan += std::isnan(value);
  EXPECT_EQ(nan, 6 * 8 * 16 * 32);
  EXPECT_TRUE(p.damage().empty());
}

TEST(Generator, DataDoesNotDependOnStorage) {
  const std::string spec = "B=2 T=20 Hk=2 Hv=4 K=16 V=32";
  const Problem a(parse_case(spec)), b(parse_case(spec + " strided pool i64 layout=vk"));
  EXPECT_EQ(to_doubles(a.forward.in.q), to_doubles(b.forward.in.q));
  EXPECT_EQ(to_doubles(a.forward.in.k), to_doubles(b.forward.in.k));
  EXPECT_EQ(to_doubles(a.forward.in.v), to_doubles(b.forward.in.v));
  EXPECT_EQ(to_doubles(a.forward.in.g), to_doubles(b.forward.in.g));
  EXPECT_EQ(to_doubles(a.backward.do_), to_doubles(b.backward.do_));
}

TEST(Generator, FindsDamage) {
  const auto damaged = [](const char* spec, auto&& harm) {
    Problem p(parse_case(spec));
    EXPECT_TRUE(p.damage().empty());
    harm(p);
    return p.damage().size();
  };
  const char* spec = "B=2 T=5 Hk=1 Hv=2 K=16 V=16 pool strided";
  EXPECT_EQ(damaged(spec, [](Problem& p) { static_cast<float*>(p.forward.out.data)[0] = 1; }), 0u);
  EXPECT_EQ(damaged(spec, [](Problem& p) { static_cast<float*>(p.forward.out.data)[16] = 1; }), 1u);  // a gap
  EXPECT_EQ(damaged(spec, [](Problem& p) { static_cast<float*>(p.forward.out.data)[-1] = 1; }), 1u);
  EXPECT_EQ(damaged(spec, [](Problem& p) { static_cast<float*>(p.forward.in.q.data)[3] += 1; }), 1u);
  EXPECT_EQ(damaged(spec,
                    [](Problem& p) {
                      const gd_tensor& pool = p.forward.final_state;
                      const auto slot = index_at(p.forward.final_state_indices, 0);
                      static_cast<float*>(pool.data)[slot * pool.stride[0]] = 1;
                    }),
            0u);
  EXPECT_EQ(damaged(spec,
                    [](Problem& p) {
                      const gd_tensor& pool = p.forward.final_state;
                      const gd_tensor& used = p.forward.final_state_indices;
                      int64_t slot = 0;
                      while (slot == index_at(used, 0) || slot == index_at(used, 1)) ++slot;
                      static_cast<float*>(pool.data)[slot * pool.stride[0]] = 1;
                    }),
            1u);
  EXPECT_EQ(damaged("T=4 Hk=1 Hv=1 K=16 V=16", [](Problem& p) { std::memset(p.forward.out.data, 0, 4 * 16 * 4 + 1); }),
            1u);
}

TEST(Compare, NamesTheWorstHead) {
  std::vector<double> truth(3 * 4 * 2, 1.0), got = truth;
  got[(1 * 4 + 2) * 2] = 1.5;
  const auto c = compare(got, truth, {3, 4, 2}, {0.1, 0});
  EXPECT_FALSE(c.ok);
  EXPECT_EQ(c.head, 2);
  EXPECT_NEAR(c.error, 0.5 / std::sqrt(6.0), 1e-12);
  EXPECT_NEAR(c.margin, c.error / 0.1, 1e-9);
  EXPECT_EQ(c.max_abs, 0.5);
  EXPECT_TRUE(compare(got, truth, {3, 4, 2}, {0.1, 0}, 2).ok);  // head 2 left out
  EXPECT_TRUE(compare(got, truth, {3, 4, 2}, {0, 0.21}).ok);    // 0.5 <= 0.21 sqrt(6)
  EXPECT_FALSE(compare(got, truth, {3, 4, 2}, {0, 0.20}).ok);
}

TEST(Compare, RefusesNanAndInfinity) {
  const std::vector<double> truth = {1, 2, 3, 4};
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    auto got = truth;
    got[2] = bad;
    const auto c = compare(got, truth, {2, 2, 1}, {1, 1});
    EXPECT_FALSE(c.ok);
    EXPECT_EQ(c.non_finite, 2);
  }
  const std::vector<double> zero(4, 0), tiny(4, 1e-30);
  EXPECT_TRUE(compare(zero, zero, {2, 2, 1}, {1e-5, 0}).ok);
  EXPECT_FALSE(compare(tiny, zero, {2, 2, 1}, {1e-5, 0}).ok);  // nothing may come where the truth is zero
}

TEST(Tolerance, HoldsThePromisedBounds) {
  const Case benchmark = parse_case("T=4096 Hk=8 Hv=8 K=128 V=128");
  EXPECT_EQ(class_of(benchmark), InputClass::benchmark);
  const auto bound = [&](Quantity q, Compute compute, gd_dtype stored) {
    const Tolerance t = tolerance(q, compute, stored, benchmark);
    EXPECT_EQ(t.absolute, 0);
    return t.relative;
  };
  EXPECT_EQ(bound(Quantity::o, Compute::bf16, GD_BF16), 4.0e-3);
  EXPECT_EQ(bound(Quantity::final_state, Compute::bf16, GD_F32), 2.5e-3);
  for (const Quantity q : {Quantity::dq, Quantity::dk, Quantity::dv}) EXPECT_EQ(bound(q, Compute::bf16, GD_BF16), 5e-3);
  for (const Quantity q : {Quantity::dg, Quantity::dbeta, Quantity::d_initial_state}) {
    EXPECT_EQ(bound(q, Compute::bf16, GD_F32), 5e-3);
  }
  for (const Quantity q : {Quantity::o, Quantity::final_state, Quantity::dq, Quantity::dk, Quantity::dv, Quantity::dg,
                           Quantity::dbeta, Quantity::d_initial_state}) {
    EXPECT_EQ(bound(q, Compute::fp32, GD_F32), 1e-5);
  }
  EXPECT_EQ(chunk_compute(GD_BF16, GD_ISA_AUTO), Compute::bf16);
  EXPECT_EQ(chunk_compute(GD_F16, GD_ISA_AMX), Compute::fp32);
  EXPECT_EQ(chunk_compute(GD_BF16, GD_ISA_AVX2), Compute::fp32);
}

}  // namespace
}  // namespace gatedelta::testing
