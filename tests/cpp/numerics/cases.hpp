// The adversarial matrix, shared by the forward and backward tests: one list of cases per thing that can go wrong.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "testing/generator.hpp"

namespace gatedelta::testing {

inline std::string num(int64_t value) { return std::to_string(value); }

inline const Specs kDtypeSpecs = {"dtype=fp32", "dtype=bf16", "dtype=fp16"};

// All of them, or with GATEDELTA_TEST_EVERY=n in the environment every n-th: emulators and sanitizers are slow.
inline Specs selected(const Specs& all) {
  const char* const text = std::getenv("GATEDELTA_TEST_EVERY");
  const size_t every = text ? std::strtoul(text, nullptr, 10) : 1;
  Specs some;
  for (size_t i = 0; i<all.size(); i += every> 0 ? every : 1) some.push_back(all[i]);
  return some;
}

inline Specs gate_cases() {
  const Specs gates = {"gate=zero",
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
  return cross(cross({"T=200 Hk=4 Hv=8 K=32 V=48"}, kDtypeSpecs), gates);
}

inline Specs beta_cases() {
  const Specs betas = {"beta=unit",
                       "beta=zeros",
                       "beta=two",
                       "beta=one",
                       "beta=logit",
                       "beta=logit2",
                       "beta=logit gdtype=bf16",
                       "beta=zeros keys=correlated gate=spiky"};
  return cross(cross({"T=150 Hk=2 Hv=4 K=48 V=32 seed=2"}, kDtypeSpecs), betas);
}

inline Specs key_cases() {
  const Specs keys = {"keys=correlated gate=zero",
                      "keys=correlated beta=two gate=weak",
                      "keys=correlated l2norm gate=raw",
                      "keys=repeated beta=one",
                      "keys=repeated beta=two gate=zero",
                      "keys=repeated l2norm",
                      "keys=loose",
                      "keys=loose l2norm",
                      "keys=random l2norm beta=logit2"};
  return cross(cross({"T=170 Hk=2 Hv=4 K=32 V=32 seed=3"}, kDtypeSpecs), keys);
}

inline Specs head_cases() {  // value heads per key head
  Specs all;
  for (const int group : {1, 2, 3, 4, 8}) {
    for (const std::string& dtype : kDtypeSpecs) {
      all.push_back("B=2 T=90 Hk=2 Hv=" + num(2 * group) + " K=32 V=16 l2norm " + dtype);
    }
  }
  all.push_back("T=70 Hk=1 Hv=8 K=16 V=32 dtype=bf16");
  all.push_back("T=70 Hk=5 Hv=15 K=16 V=16");
  for (const char* heads : {"Hk=2 Hv=4 dtype=bf16", "Hk=4 Hv=12", "Hk=3 Hv=24 dtype=fp16", "Hk=1 Hv=4", "Hk=3 Hv=3"}) {
    all.push_back("tiled B=2 T=90 K=32 V=16 l2norm gate=raw beta=logit " + std::string(heads));
    all.push_back("tiled T=150 K=16 V=48 layout=vk strided " + std::string(heads));
  }
  return all;
}

inline Specs size_cases() {  // K and V
  Specs all;
  for (int size = 16; size <= 256; size += 16) {
    const std::string dtype = kDtypeSpecs[size / 16 % 3];
    all.push_back("T=80 Hk=1 Hv=1 K=" + num(size) + " V=32 " + dtype);
    all.push_back("T=80 Hk=1 Hv=1 K=32 V=" + num(size) + " layout=vk " + dtype);
  }
  for (const std::string& dtype : kDtypeSpecs) {
    for (const char* corner : {"K=16 V=256", "K=256 V=16", "K=256 V=256", "K=128 V=128", "K=64 V=128", "K=144 V=208"}) {
      all.push_back("T=100 Hk=1 Hv=2 " + std::string(corner) + " " + dtype);
    }
  }
  return all;
}

inline Specs pack_cases() {
  std::string every_length;
  for (int length = 0; length <= 130; ++length) {
    if (length) every_length += '+';
    every_length += num(length);
  }
  Specs all;
  for (const std::string& dtype : kDtypeSpecs) {
    all.push_back("lengths=" + every_length + " pad=9 Hk=1 Hv=2 K=16 V=32 " + dtype);
    all.push_back("lengths=0+0+300+0+1+63+64+65+0 pad=1 i64 Hk=2 Hv=2 K=32 V=32 " + dtype);
    all.push_back("lengths=5x1+128+2x0 Hk=1 Hv=3 K=16 V=16 gate=strong " + dtype);
    all.push_back("lengths=129 pad=70 Hk=1 Hv=1 K=16 V=16 gate=raw l2norm " + dtype);
  }
  all.push_back("lengths=4x0 pad=5 Hk=1 Hv=2 K=16 V=16");
  all.push_back("lengths=70+0+1100+1 pad=3 Hk=2 Hv=6 tiled K=16 V=16 pool every=64");
  all.push_back("lengths=0 Hk=1 Hv=2 K=16 V=16");
  all.push_back("B=3 T=0 Hk=1 Hv=2 K=16 V=16");
  all.push_back("lengths=40+0+90 pad=3 Hk=1 Hv=2 K=16 V=16 h0=0 dht=0");
  return all;
}

inline Specs state_cases() {
  Specs all = cross(
      cross({"lengths=70+0+64+1+129+30+20 pad=4 Hk=1 Hv=2 K=48 V=16"}, {"state=fp32", "state=bf16", "state=fp16"}),
      cross({"layout=kv", "layout=vk"},
            {"pool=0", "pool=1", "pool=1 i64 strided", "pool=1 first_slot=2", "h0=0", "ht=0", "dht=0"}));
  for (std::string& spec : all) spec += " " + kDtypeSpecs[(&spec - all.data()) % 3];
  return all;
}

inline Specs stride_cases() {
  return cross(
      {"B=2 T=75 Hk=2 Hv=4 K=32 V=48 strided", "lengths=70+3+0+66 pad=6 Hk=1 Hv=2 K=16 V=80 strided layout=vk"},
      cross(kDtypeSpecs, {"gate=mixed", "gate=raw l2norm beta=logit"}));
}

inline Specs scale_cases() {
  return {"T=70 Hk=1 Hv=2 K=32 V=32 scale=0",
          "T=70 Hk=1 Hv=2 K=32 V=32 scale=-2.5",
          "T=70 Hk=1 Hv=2 K=32 V=32 scale=1 dtype=bf16",
          "T=70 Hk=1 Hv=2 K=32 V=32 dtype=bf16 odtype=fp32",
          "T=70 Hk=1 Hv=2 K=32 V=32 dtype=fp32 odtype=bf16",
          "T=70 Hk=1 Hv=2 K=32 V=32 dtype=fp16 odtype=fp32"};
}

// What the promised bounds are about: the benchmark's inputs at the benchmark's head size.
inline Specs benchmark_cases() {
  return {"T=1024 Hk=2 Hv=4 K=128 V=128 dtype=bf16", "T=1024 Hk=2 Hv=4 K=128 V=128 dtype=fp32",
          "T=1024 Hk=2 Hv=4 K=128 V=128 dtype=bf16 l2norm gate=raw"};
}

}  // namespace gatedelta::testing
