#include "tests/cpp/ops/conv1d.hpp"

namespace gatedelta::testing {
namespace {

using Conv1d = OnEngine;

const Specs kTaps = {"W=2", "W=3 silu", "W=4 bias silu", "W=4 bias"};
const Specs kMajors = {"channel_major=0", "channel_major=1"};
const Specs kNumbers = {"dtype=fp32", "dtype=bf16 wdtype=bf16"};
// A width that leaves a rest in the CPU's vectors, and one that the GPU's kernels for the usual order of memory take.
const std::string kWidth = kOnCpu ? " D=20 " : " D=24 ";

TEST_F(Conv1d, Types) {
  check_conv1d(cross(cross({"B=2 T=70 D=72 bias silu", "B=2 T=264 D=72 bias silu"}, kMajors),
                     joined({"dtype=fp32", "dtype=bf16 wdtype=bf16 state=bf16", "dtype=fp16 wdtype=fp16 state=fp16",
                             "dtype=bf16 odtype=fp32 state=fp16"},
                            either({"dtype=fp32 odtype=bf16 wdtype=fp16"}, {}))));
}

TEST_F(Conv1d, Lengths) {
  Specs lengths;
  for (const int T : {0,  1,  2,   3,   4,   5,   8,   16,  19,  60,  61,  62,  63,  64,
                      65, 67, 122, 123, 124, 128, 130, 240, 248, 256, 264, 504, 1000})
    lengths.push_back("T=" + num(T) + " D=20");
  check_conv1d(cross(cross(lengths, kTaps), cross(kMajors, kNumbers)));
  check_conv1d_backward(cross(cross(lengths, {"B=2 silu h0=0 ht=0", "B=2 bias h0=0 ht=0"}), cross(kMajors, kNumbers)));
}

TEST_F(Conv1d, Channels) {
  Specs channels;
  for (const int D : {1, 2, 3, 4, 5, 12, 15, 16, 17, 33, 63, 64, 65, 127, 129, 256, 257, 260, 520, 1024})
    channels.push_back("B=2 T=24 D=" + num(D));
  check_conv1d(cross(cross(channels, kTaps), cross(kMajors, {"dtype=bf16", "strided"})));
}

TEST_F(Conv1d, PackedSequences) {
  check_conv1d(cross(cross({"lengths=3+0+1+70+2+64+4 pad=5 D=24", "lengths=0+0 D=8", "lengths=1+1+1+1 D=8",
                            "lengths=1+1+1+1+1+1+1+1+1+1 D=8", "lengths=0 pad=3 D=8", "lengths=200 D=70",
                            "lengths=700+1+0+2+90 D=72", "lengths=61+19+67+24+16+35 pad=40 D=132"},
                           kTaps),
                     {"dtype=fp32", "dtype=bf16 channel_major i64", "strided", "channel_major strided", "h0=0", "ht=0",
                      "state_tokens_first", "state_tokens_first dtype=bf16 state=bf16"}));
  std::string many = "lengths=1";  // more sequences than a warp searches at a time
  for (int n = 1; n < 1500; ++n) many += "+" + num(n % 7 ? n % 4 : 0);
  check_conv1d(cross({many}, {"D=8", "D=4 W=2 silu dtype=bf16", "D=3"}));
}

TEST_F(Conv1d, States) {
  check_conv1d(cross(cross({"B=3 T=1 D=20", "B=3 T=2 D=20", "B=3 T=7 D=20", "lengths=5+0+1+2 D=20", "B=3 T=64 D=24"},
                           {"W=4", "W=4 S=4", "W=4 S=9", "W=2 S=5 final_S=2", "W=3 S=2 final_S=7", "W=4 S=70"}),
                     {"inplace=0", "inplace", "inplace state_tokens_first state=bf16", "strided", "h0=0 final_S=6",
                      "dtype=bf16 state=bf16 channel_major inplace"}));
}

TEST_F(Conv1d, Pools) {
  check_conv1d_forward(cross(cross({"B=11 T=1 pool" + kWidth, "B=11 T=6 pool S=4" + kWidth,
                                    "B=11 T=8 pool S=4" + kWidth, "lengths=3+0+1+9+2+0+4+5+6+7+1 pad=2 pool" + kWidth},
                                   {"inplace=0", "inplace", "inplace null_slot", "null_slot i64",
                                    "inplace strided state_tokens_first", "inplace state_tokens_first"}),
                             {"dtype=fp32 silu", "dtype=bf16 state=bf16 bias", "channel_major silu"}));
  check_conv1d_backward({"B=11 T=6 D=20 pool ht=0", "lengths=3+0+1+9+2+0+4+5+6+7+1 D=20 pool ht=0 null_slot silu"});
}

TEST_F(Conv1d, DraftWindows) {
  for (int T = 1; T <= 8; ++T) {
    const std::string window = " drafts T=" + num(T) + kWidth;
    check_conv1d_forward(
        cross(cross({"B=7" + window, "B=11 pool" + window}, {"W=2", "W=3", "W=4", "W=4 S=12"}),
              {"inplace", "inplace state_tokens_first state=bf16", "inplace state_tokens_first dtype=bf16 state=bf16",
               "inplace=0", "inplace steps silu", "inplace strided null_slot"}));
  }
  check_conv1d_forward(cross(
      {"lengths=3+0+1+8+2+5+4 pad=2 drafts" + kWidth, "lengths=1+1+4+0+2+5+4+1 drafts pool" + kWidth},
      {"inplace", "inplace i64 channel_major", "inplace=0", "inplace steps", "inplace state_tokens_first dtype=bf16"}));
}

TEST_F(Conv1d, Steps) {
  check_conv1d_forward(cross({"B=3 T=5 D=20 steps", "lengths=3+0+1+70+2 pad=4 D=20 steps", "B=11 T=2 D=20 steps pool"},
                             {"W=4", "W=2 strided", "W=3 dtype=bf16 state=bf16 channel_major"}));
}

// Anything with anything. On the CPU the sizes are smaller.
TEST_F(Conv1d, RandomCases) {
  const Pool pool(3);
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    auto pick = [&, i = uint64_t{0}](int64_t below) mutable {
      return static_cast<int64_t>(uniform(seed, 99, i++) * static_cast<double>(below));
    };
    const char* const types[] = {"fp32", "bf16", "fp16"};
    std::string spec = "W=" + num(2 + pick(3)) + " seed=" + std::to_string(seed) + " dtype=" + types[pick(3)];
    spec += std::string(" wdtype=") + types[pick(3)];
    spec += std::string(" state=") + types[pick(3)];
    spec += " D=" + num(pick(3) ? 8 * (1 + pick(kOnCpu ? 18 : 60)) : 1 + pick(kOnCpu ? 150 : 350));
    if (pick(2)) {
      spec += " lengths=" + num(pick(90));
      for (int64_t n = pick(pick(3) || kOnCpu ? 8 : 200); n > 0; --n) spec += "+" + num(pick(3) ? pick(5) : pick(150));
      spec += " pad=" + num(pick(2) * pick(70));
    } else {
      const int64_t T = pick(2) ? pick(9) : pick(kOnCpu ? 200 : 900);
      spec += " B=" + num(1 + pick(4)) + " T=" + num(pick(2) ? T / 8 * 8 : T);
    }
    for (const char* flag : {" channel_major", " bias", " silu", " state_tokens_first", " i64"})
      if (pick(2)) spec += flag;
    if (pick(4) == 0) spec += " strided";
    if (pick(2)) spec += " S=" + num(3 + pick(8));
    check_conv1d_backward({spec}, pool);
    for (const char* flag : {" inplace", " pool", " null_slot", " steps"})
      if (pick(3) == 0) spec += flag;
    check_conv1d_forward({spec}, pool);
  }
}

}  // namespace
}  // namespace gatedelta::testing
