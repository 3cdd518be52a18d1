// The adversarial matrix: one list of cases per thing that can go wrong, shared by operations and engines.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "testing/generator.hpp"

namespace gatedelta::testing {

enum class EngineKind { cpu, cuda, cuda_portable };
#if defined GD_TEST_PORTABLE
constexpr EngineKind kEngine = EngineKind::cuda_portable;
#elif defined GD_TEST_CUDA
constexpr EngineKind kEngine = EngineKind::cuda;
#else
constexpr EngineKind kEngine = EngineKind::cpu;
#endif
constexpr bool kOnCpu = kEngine == EngineKind::cpu;
constexpr bool kIsPortable = kEngine == EngineKind::cuda_portable;

inline std::string num(int64_t value) { return std::to_string(value); }
inline Specs either(const Specs& on_cpu, const Specs& on_cuda) { return kOnCpu ? on_cpu : on_cuda; }
inline Specs joined(Specs a, const Specs& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// All of them, or with GATEDELTA_TEST_EVERY=n in the environment every n-th: emulators and sanitizers are slow.
inline Specs selected(const Specs& all) {
  const char* const text = std::getenv("GATEDELTA_TEST_EVERY");
  const size_t every = text ? std::strtoul(text, nullptr, 10) : 1;
  Specs some;
  for (size_t i = 0; i<all.size(); i += every> 0 ? every : 1) some.push_back(all[i]);
  return some;
}

inline const Specs kDtypeSpecs = {"dtype=fp32", "dtype=bf16", "dtype=fp16"};
inline const Specs kStates = {"state=fp32", "state=bf16", "state=fp16"};
inline const Specs kLayouts = {"layout=kv", "layout=vk"};

// The types of q, k and v that every case of forward and backward runs with. On a GPU also the head size, over the
// case's own: Hopper's kernels have this one. Other sizes and fp32 have tests of their own.
inline const Specs kTypes = either(kDtypeSpecs, {"K=128 V=128 dtype=bf16", "K=128 V=128 dtype=fp16"});
// The same with types and layouts of states.
inline const Specs kStorage = either({"dtype=bf16", "dtype=fp32 state=bf16 layout=vk", "dtype=fp16 state=fp16"},
                                     cross({"", "state=bf16 layout=vk", "state=fp16"}, kTypes));

inline const Specs kGates = {"gate=zero",
                             "gate=weak",
                             "gate=strong",
                             "gate=spiky",
                             "gate=mixed",
                             "gate=inf",
                             "gate=huge",
                             "gate=raw",
                             "gate=raw dt_bias=0",
                             "gate=raw gdtype=bf16 beta=logit",
                             "gate=mixed gdtype=fp16",
                             "gate=huge gdtype=bf16"};
inline const Specs kBetas = {
    "beta=unit", "beta=zeros", "beta=two", "beta=one", "beta=logit", "beta=logit2", "beta=logit gdtype=bf16"};
inline const Specs kKeys = {"keys=correlated gate=zero",
                            "keys=correlated beta=two gate=weak",
                            "keys=correlated l2norm gate=raw",
                            "keys=repeated beta=one",
                            "keys=repeated l2norm",
                            "keys=loose",
                            "keys=loose l2norm",
                            "keys=random l2norm beta=logit2"};

inline Specs gate_cases() { return cross(cross({"T=200 Hk=4 Hv=8 K=32 V=48"}, kTypes), kGates); }
inline Specs beta_cases() {
  return cross(cross({"T=150 Hk=2 Hv=4 K=48 V=32 seed=2"}, kTypes),
               joined(kBetas, either({"beta=zeros keys=correlated gate=spiky"}, {})));
}
inline Specs key_cases() {
  return cross(cross({"T=170 Hk=2 Hv=4 K=32 V=32 seed=3"}, kTypes),
               joined(kKeys, either({"keys=repeated beta=two gate=zero"}, {})));
}

// Keys that resemble each other: rows of U undo each other, and what sums them has the rounding errors of all. Several
// heads and lengths, because one may be right by chance; the last ones have few tokens.
inline Specs similar_key_cases() {
  return cross({"T=127 Hk=3 Hv=6 K=80 V=16 keys=repeated gate=raw beta=unit",
                "lengths=2+112+172+45+112 pad=20 Hk=3 Hv=3 K=128 V=16 keys=repeated gate=spiky beta=logit2 l2norm "
                "scale=0.4 h0=0",
                "T=89 Hk=2 Hv=2 K=224 V=64 keys=repeated gate=spiky beta=two h0=0 dht=0",
                "T=130 Hk=3 Hv=6 K=112 V=80 keys=similar gate=zero beta=two l2norm",
                "T=67 Hk=1 Hv=2 K=144 V=128 keys=similar gate=spiky beta=logit2 dht=0",
                "T=200 Hk=2 Hv=4 K=48 V=256 keys=repeated gate=strong beta=two",
                "lengths=1+2+3+1+5+1+9+1 Hk=3 Hv=6 K=96 V=256 keys=similar gate=zero beta=zeros l2norm h0=0"},
               {"dtype=bf16 seed=1", "dtype=bf16 seed=2", "dtype=bf16 seed=3", "dtype=fp32 seed=4"});
}

inline Specs head_cases() {  // value heads per key head
  Specs all =
      cross({"B=2 T=90 Hk=2 Hv=2 l2norm", "B=2 T=90 Hk=2 Hv=4 l2norm", "B=2 T=90 Hk=2 Hv=6 l2norm",
             "B=2 T=90 Hk=2 Hv=8 l2norm", "B=2 T=90 Hk=2 Hv=16 l2norm", "B=2 T=150 Hk=2 Hv=2", "B=2 T=150 Hk=2 Hv=4",
             "T=150 Hk=1 Hv=3", "T=150 Hk=2 Hv=16 l2norm", "T=70 Hk=1 Hv=8", "T=70 Hk=1 Hv=33", "T=70 Hk=5 Hv=15"},
            cross({"K=32 V=16"}, kTypes));
  if (!kOnCpu) return all;
  for (const char* heads : {"Hk=2 Hv=4 dtype=bf16", "Hk=4 Hv=12", "Hk=3 Hv=24 dtype=fp16", "Hk=1 Hv=4", "Hk=3 Hv=3"}) {
    all.push_back("tiled B=2 T=90 K=32 V=16 l2norm gate=raw beta=logit " + std::string(heads));
    all.push_back("tiled T=150 K=16 V=48 layout=vk strided " + std::string(heads));
  }
  return all;
}

inline Specs size_cases() {  // K and V
  Specs all;
  for (int size = 16; size <= 256; size += 16) {
    const std::string text = num(size);
    if (kOnCpu) {
      const std::string dtype = kDtypeSpecs[size / 16 % 3];
      all.push_back("T=80 Hk=1 Hv=1 K=" + text + " V=32 " + dtype);
      all.push_back("T=80 Hk=1 Hv=1 K=32 V=" + text + " layout=vk " + dtype);
    } else {
      const std::string other = num(16 + (size * 7 + 80) % 256);
      all.push_back("T=150 Hk=1 Hv=2 K=" + text + " V=" + text + " dtype=bf16");
      all.push_back("T=97 Hk=2 Hv=4 K=" + text + " V=" + other + " dtype=fp16 layout=vk l2norm gate=raw");
      all.push_back("lengths=70+0+1+33 pad=9 Hk=1 Hv=3 K=" + other + " V=" + text + " dtype=bf16 pool every=64");
    }
  }
  if (!kOnCpu) return all;
  return joined(all, cross(cross({"T=100 Hk=1 Hv=2"}, kDtypeSpecs),
                           {"K=16 V=256", "K=256 V=16", "K=256 V=256", "K=128 V=128", "K=64 V=128", "K=144 V=208"}));
}

// On a GPU a CTA has a different share of a head with few heads, with some and with many.
inline Specs many_heads_cases() {
  return cross({"T=70 Hk=2 Hv=4", "B=9 T=70 Hk=2 Hv=4", "B=50 T=70 Hk=4 Hv=8", "T=70 Hk=1 Hv=300"},
               {"K=64 V=64 dtype=bf16", "K=128 V=128 dtype=bf16", "K=128 V=192 dtype=fp16", "K=256 V=256 dtype=bf16"});
}

inline std::string every_length() {
  std::string lengths = "0";
  for (int length = 1; length <= 130; ++length) lengths += "+" + num(length);
  return lengths;
}
inline Specs every_length_cases() {
  Specs all = cross({"lengths=" + every_length() + " pad=9 Hk=1 Hv=2 K=16 V=32"}, kTypes);
  if (!kOnCpu) return all;
  for (int T = 0; T <= 130; ++T)
    all.push_back("T=" + num(T) + " Hk=1 Hv=1 K=16 V=16 seed=" + num(T + 1) + " " + kDtypeSpecs[T % 3]);
  return all;
}

inline Specs pack_cases() {
  return joined(
      cross({"lengths=0+0+300+0+1+63+64+65+0 pad=1 i64 Hk=2 Hv=2 K=32 V=32",
             "lengths=5x1+128+2x0 Hk=1 Hv=3 K=16 V=16 gate=strong", "lengths=129 pad=70 K=16 V=16 gate=raw l2norm",
             "lengths=4x0 pad=5 Hk=1 Hv=2 K=16 V=16", "lengths=40+0+90 pad=3 Hk=1 Hv=2 K=16 V=16 h0=0 dht=0",
             "lengths=129 pad=200 K=16 V=16", "lengths=0 K=16 V=16", "B=3 T=0 Hk=1 Hv=2 K=16 V=16"},
            kTypes),
      either({"lengths=70+0+1100+1 pad=3 Hk=2 Hv=6 tiled K=16 V=16 pool every=64"}, {}));
}

// The CPU takes the three types in turn.
inline Specs state_cases() {
  Specs all = cross(
      cross({"lengths=70+0+64+1+129+30+20 pad=4 Hk=1 Hv=2 K=48 V=16"}, kStates),
      cross(kLayouts, {"pool=0", "pool=1", "pool=1 i64 strided", "pool=1 first_slot=2", "h0=0", "ht=0", "dht=0"}));
  if (!kOnCpu) return cross(all, kTypes);
  for (std::string& spec : all) spec += " " + kDtypeSpecs[(&spec - all.data()) % 3];
  return all;
}

inline Specs stride_cases() {
  return cross(
      {"B=2 T=75 Hk=2 Hv=4 K=32 V=48 strided", "lengths=70+3+0+66+128 pad=6 Hk=1 Hv=2 K=16 V=80 strided layout=vk"},
      cross(kTypes, {"gate=mixed", "gate=raw l2norm beta=logit"}));
}

// Outputs of another type than the inputs' are the CPU's alone.
inline Specs scale_cases() {
  return joined(
      cross(cross({"T=150 Hk=1 Hv=2 K=32 V=32", "T=150 Hk=1 Hv=2 K=32 V=32 l2norm"}, kTypes),
            {"scale=0", "scale=-2.5", "scale=-0.25", "scale=1"}),
      either({"T=70 Hk=1 Hv=2 K=32 V=32 dtype=bf16 odtype=fp32", "T=70 Hk=1 Hv=2 K=32 V=32 dtype=fp32 odtype=bf16",
              "T=70 Hk=1 Hv=2 K=32 V=32 dtype=fp16 odtype=fp32"},
             {}));
}

// What the promised bounds are about: the benchmark's inputs at the benchmark's head size.
inline Specs benchmark_cases() {
  return either({"T=1024 Hk=2 Hv=4 K=128 V=128 dtype=bf16", "T=1024 Hk=2 Hv=4 K=128 V=128 dtype=fp32",
                 "T=1024 Hk=2 Hv=4 K=128 V=128 dtype=bf16 l2norm gate=raw"},
                cross({"T=1024 Hk=2 Hv=4", "T=1024 Hk=2 Hv=4 l2norm gate=raw", "B=2 T=4096 Hk=1 Hv=4"}, kTypes));
}

}  // namespace gatedelta::testing
