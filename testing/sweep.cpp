#include "testing/sweep.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "testing/contents.hpp"

namespace gatedelta::testing {

namespace {

constexpr uint64_t kStream = 0x5eed;

// A sequence of random choices.
class Dice {
 public:
  Dice(uint64_t seed, uint64_t index) : seed_(seed * 0x2545f4914f6cdd1d + index) {}

  int64_t below(int64_t n) {
    return static_cast<int64_t>(bits_at(seed_, kStream, count_++) % static_cast<uint64_t>(n));
  }
  int64_t from(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool percent(int share) { return below(100) < share; }
  template <class T, size_t n>
  T of(const T (&list)[n]) {
    return list[below(static_cast<int64_t>(n))];
  }

 private:
  uint64_t seed_, count_ = 0;
};

int64_t draw_length(Dice& dice) {
  if (dice.percent(50)) return dice.from(1, 130);
  if (dice.percent(85)) return dice.from(100, 320);
  return dice.from(300, 1500);
}

void draw_tokens(Dice& dice, Case& c) {
  if (dice.percent(60)) {
    c.T = draw_length(dice);
    c.B = c.T < 200 && dice.percent(20) ? 2 : 1;
    return;
  }
  const int64_t sequences = dice.from(1, 5);
  for (int64_t n = 0; n < sequences; ++n) c.lengths.push_back(dice.percent(15) ? dice.from(0, 2) : dice.from(1, 200));
  c.pad = dice.percent(30) ? dice.from(1, 70) : 0;
}

int64_t draw_size(Dice& dice) {
  constexpr int64_t kUsual[] = {64, 128, 128, 256};
  return dice.percent(40) ? dice.of(kUsual) : 16 * dice.from(1, 16);
}

}  // namespace

Case draw_case(uint64_t seed, uint64_t index, const SweepLimits& limits) {
  constexpr GateKind kGates[] = {GateKind::zero,  GateKind::weak,     GateKind::strong,        GateKind::spiky,
                                 GateKind::mixed, GateKind::infinite, GateKind::very_negative, GateKind::raw};
  constexpr BetaKind kBetas[] = {BetaKind::unit,  BetaKind::zeros,         BetaKind::two,
                                 BetaKind::logit, BetaKind::logit_doubled, BetaKind::constant_one};
  constexpr KeyKind kKeys[] = {KeyKind::random,   KeyKind::correlated, KeyKind::similar, KeyKind::similar,
                               KeyKind::repeated, KeyKind::repeated,   KeyKind::loose};
  constexpr gd_dtype kFloats[] = {GD_F32, GD_BF16, GD_F16};
  Dice dice(seed, index);
  Case c;
  c.dtype = limits.fp32 && dice.percent(20) ? GD_F32 : dice.percent(70) ? GD_BF16 : GD_F16;
  draw_tokens(dice, c);
  c.Hk = dice.from(1, 3);
  c.Hv = c.Hk * dice.from(1, 4);
  c.K = limits.size ? limits.size : draw_size(dice);
  c.V = limits.size ? limits.size : draw_size(dice);
  c.gate = dice.of(kGates);
  c.beta = dice.of(kBetas);
  c.keys = dice.of(kKeys);
  c.l2norm = dice.percent(50);
  // |k|^2 beta would be above 2, where the layer itself is unstable.
  const bool reaches_two = c.beta == BetaKind::two || c.beta == BetaKind::logit_doubled;
  if (c.keys == KeyKind::loose && reaches_two) c.l2norm = true;
  c.gdtype = dice.percent(60) ? GD_F32 : dice.of(kFloats);
  c.state = dice.percent(60) ? GD_F32 : dice.of(kFloats);
  c.layout = dice.percent(50) ? GD_STATE_KV : GD_STATE_VK;
  c.dt_bias = dice.percent(80);
  if (dice.percent(15)) c.scale = 0.4f;
  c.h0 = dice.percent(70), c.ht = dice.percent(85), c.dht = dice.percent(70);
  c.strided = dice.percent(15);
  c.i64 = dice.percent(20);
  if (dice.percent(15)) c.every = 64 * dice.from(1, 3);
  if (limits.cuts && c.dtype != GD_F32 && dice.percent(50)) c.segment = dice.from(1, 8);
  c.seed = bits_at(seed, kStream, index) >> 40;
  const auto work = [&] { return c.B * c.total_tokens() * c.Hv * c.K * c.V; };
  while (work() > limits.work && c.Hv > c.Hk) c.Hv -= c.Hk;
  while (work() > limits.work && c.Hk > 1) c.Hv /= c.Hk, c.Hk = 1;
  if (!limits.size) {
    while (work() > limits.work && std::max(c.K, c.V) > 64) (c.K > c.V ? c.K : c.V) -= 16;
  }
  while (work() > limits.work && c.lengths.size() > 1) c.lengths.pop_back();
  if (work() > limits.work && c.lengths.empty()) c.B = 1, c.T = std::max<int64_t>(limits.work / (work() / c.T), 1);
  return c;
}

void SweepTally::add(const std::string& call, const Case& c, const Judgement& judgement) {
  const std::string spec = describe(c);
  const std::lock_guard lock(mutex_);
  ++calls_;
  for (const std::string& problem : judgement.problems) problems_.push_back(call + " " + spec + ": " + problem);
  for (const Verdict& v : judgement.verdicts) {
    const bool wrong = v.comparison.non_finite >= 0;
    const double margin = wrong ? std::numeric_limits<double>::infinity() : v.comparison.margin;
    Worst& worst = worst_[call][v.quantity];
    ++worst.count;
    worst.over += !v.comparison.ok;
    // Among equals the first by text, so that the report does not depend on the order of threads.
    if (margin > worst.margin || (margin == worst.margin && spec < worst.spec)) {
      worst.margin = margin;
      worst.error = v.comparison.error;
      worst.spec = spec;
    }
  }
}

double SweepTally::worst_share() const {
  double share = 0;
  for (const auto& [call, quantities] : worst_)
    for (const auto& [quantity, worst] : quantities) share = std::max(share, worst.margin);
  return share;
}

std::string SweepTally::text(bool all) const {
  std::string text;
  const auto line = [&text](const char* format, auto... values) {
    char buffer[160];
    std::snprintf(buffer, sizeof buffer, format, values...);
    text += buffer;
  };
  for (const auto& [call, quantities] : worst_) {
    line("%-24s", call.c_str());
    for (const auto& [quantity, worst] : quantities) line("  %s %.2f", quantity.c_str(), worst.margin);
    text += "\n";
    for (const auto& [quantity, worst] : quantities) {
      if (!worst.over && !all) continue;
      line("  %-15s error %.2e, %.2f of its bound; %lld of %lld outside; ", quantity.c_str(), worst.error, worst.margin,
           static_cast<long long>(worst.over), static_cast<long long>(worst.count));
      text += worst.spec + "\n";
    }
  }
  for (const std::string& problem : problems_) text += problem + "\n";
  line("%lld calls, worst share of a bound %.2f\n", static_cast<long long>(calls_), worst_share());
  return text;
}

bool SweepTally::ok() const {
  return problems_.empty() && std::all_of(worst_.begin(), worst_.end(), [](const auto& call) {
           return std::all_of(call.second.begin(), call.second.end(),
                              [](const auto& entry) { return entry.second.over == 0; });
         });
}

}  // namespace gatedelta::testing
