#include "testing/case.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace gatedelta::testing {

int64_t Case::total_tokens() const {
  return lengths.empty() ? T : std::accumulate(lengths.begin(), lengths.end(), pad);
}

namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

int64_t parse_int(std::string_view key, std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    refuse(std::string(key) + "=" + std::string(text) + ": not a whole number");
  }
  return value;
}

// "3x64+100": repetitions and sums.
std::vector<int64_t> parse_lengths(std::string_view key, std::string_view text) {
  std::vector<int64_t> lengths;
  while (!text.empty()) {
    const auto plus = text.find('+');
    auto term = text.substr(0, plus);
    text = plus == text.npos ? std::string_view() : text.substr(plus + 1);
    int64_t times = 1;
    if (const auto x = term.find('x'); x != term.npos) {
      times = parse_int(key, term.substr(0, x));
      term = term.substr(x + 1);
    }
    if (times < 0 || times > 1'000'000) refuse(std::string(key) + ": repetition out of range");
    lengths.insert(lengths.end(), times, parse_int(key, term));
  }
  return lengths;
}

std::string format_lengths(const std::vector<int64_t>& lengths) {
  std::string text;
  for (size_t i = 0; i < lengths.size();) {
    size_t same = i;
    while (same < lengths.size() && lengths[same] == lengths[i]) ++same;
    if (!text.empty()) text += '+';
    if (same - i > 1) text += std::to_string(same - i) + "x";
    text += std::to_string(lengths[i]);
    i = same;
  }
  return text;
}

using Names = std::vector<std::pair<const char*, int>>;

const Names kDtypes = {{"fp32", GD_F32}, {"bf16", GD_BF16}, {"fp16", GD_F16}};
const Names kLayouts = {{"kv", GD_STATE_KV}, {"vk", GD_STATE_VK}};
const Names kGates = {{"zero", int(GateKind::zero)},          {"weak", int(GateKind::weak)},
                      {"strong", int(GateKind::strong)},      {"spiky", int(GateKind::spiky)},
                      {"mixed", int(GateKind::mixed)},        {"inf", int(GateKind::infinite)},
                      {"huge", int(GateKind::very_negative)}, {"raw", int(GateKind::raw)}};
const Names kBetas = {
    {"unit", int(BetaKind::unit)},   {"zeros", int(BetaKind::zeros)},          {"two", int(BetaKind::two)},
    {"logit", int(BetaKind::logit)}, {"logit2", int(BetaKind::logit_doubled)}, {"one", int(BetaKind::constant_one)}};
const Names kKeys = {{"random", int(KeyKind::random)},
                     {"correlated", int(KeyKind::correlated)},
                     {"similar", int(KeyKind::similar)},
                     {"repeated", int(KeyKind::repeated)},
                     {"loose", int(KeyKind::loose)}};
const Names kSteps = {{"none", int(StepKind::none)},
                      {"dense", int(StepKind::dense)},
                      {"pool", int(StepKind::pool)},
                      {"rows", int(StepKind::rows)}};

int parse_name(const Names& names, std::string_view key, std::string_view text) {
  std::string choices;
  for (const auto& [name, value] : names) {
    if (text == name) return value;
    if (!choices.empty()) choices += ", ";
    choices += name;
  }
  refuse(std::string(key) + "=" + std::string(text) + ": expected one of " + choices);
}

std::string format_name(const Names& names, int value) {
  for (const auto& [name, each] : names) {
    if (each == value) return name;
  }
  return "?";
}

// One key of the text form: how to read it and how to write it. Written only where it differs from the default.
struct Key {
  const char* name;
  const char* help;
  std::function<void(Case&, std::string_view)> set;
  std::function<std::string(const Case&)> get;
};

template <class Field>
Key integer(const char* name, Field Case::*field, const char* help) {
  return {name, help, [=](Case& c, std::string_view s) { c.*field = static_cast<Field>(parse_int(name, s)); },
          [=](const Case& c) { return std::to_string(c.*field); }};
}

Key boolean(const char* name, bool Case::*field, const char* help) {
  return {name, help,
          [=](Case& c, std::string_view s) {
            const int64_t value = parse_int(name, s);
            if (value != 0 && value != 1) refuse(std::string(name) + ": expected 0 or 1");
            c.*field = value != 0;
          },
          [=](const Case& c) { return std::string(c.*field ? "1" : "0"); }};
}

template <class Enum>
Key choice(const char* name, Enum Case::*field, const Names& names, const char* help) {
  return {name, help,
          [=, &names](Case& c, std::string_view s) { c.*field = static_cast<Enum>(parse_name(names, name, s)); },
          [=, &names](const Case& c) { return format_name(names, static_cast<int>(c.*field)); }};
}

const std::vector<Key>& keys() {
  static const std::vector<Key> all = {
      integer("B", &Case::B, "batch"),
      integer("T", &Case::T, "tokens per batch entry"),
      {"lengths", "packed sequence lengths, e.g. 3x64+0+130 (then B and T follow)",
       [](Case& c, std::string_view s) { c.lengths = parse_lengths("lengths", s); },
       [](const Case& c) { return format_lengths(c.lengths); }},
      integer("pad", &Case::pad, "tokens past the last packed sequence"),
      integer("Hk", &Case::Hk, "query/key heads"),
      integer("Hv", &Case::Hv, "value heads, a multiple of Hk"),
      boolean("tiled", &Case::tiled, "value head h uses key head h % Hk instead of h / (Hv/Hk)"),
      integer("K", &Case::K, "head size of q and k"),
      integer("V", &Case::V, "head size of v"),
      choice("dtype", &Case::dtype, kDtypes, "q, k, v, do and their gradients: fp32 bf16 fp16"),
      choice("odtype", &Case::odtype, kDtypes, "o, if not dtype: fp32 bf16 fp16"),
      choice("gdtype", &Case::gdtype, kDtypes, "g and beta: fp32 bf16 fp16"),
      choice("state", &Case::state, kDtypes, "state tensors: fp32 bf16 fp16"),
      choice("layout", &Case::layout, kLayouts, "order inside a state matrix: kv vk"),
      choice("gate", &Case::gate, kGates, "zero weak strong spiky mixed inf huge raw"),
      choice("beta", &Case::beta, kBetas, "unit zeros two one logit logit2"),
      choice("keys", &Case::keys, kKeys, "random correlated similar repeated loose"),
      boolean("dt_bias", &Case::dt_bias, "with gate=raw: 0 leaves dt_bias out"),
      boolean("l2norm", &Case::l2norm, "normalise q and k inside the call"),
      {"scale", "output scale, default K^-1/2",
       [](Case& c, std::string_view s) {
         char* end = nullptr;
         const std::string text(s);
         c.scale = std::strtof(text.c_str(), &end);
         if (text.empty() || *end) refuse("scale=" + text + ": not a number");
       },
       [](const Case& c) {
         std::ostringstream text;
         if (c.scale) text << std::hexfloat << *c.scale;
         return text.str();
       }},
      boolean("h0", &Case::h0, "0: no initial state"),
      boolean("ht", &Case::ht, "0: no final state"),
      boolean("dht", &Case::dht, "0: no gradient of the final state"),
      boolean("pool", &Case::pool, "states in a pool, found by indices"),
      integer("first_slot", &Case::first_slot, "slots of the pool below it are null"),
      boolean("inplace", &Case::inplace, "final state replaces the initial state"),
      boolean("i64", &Case::i64, "int64 offsets and indices"),
      boolean("strided", &Case::strided, "gaps in every tensor"),
      integer("every", &Case::every, "checkpoint interval in tokens (a multiple of 64)"),
      boolean("offsets", &Case::offsets, "one checkpoint per sequence, at checkpoint_offsets"),
      integer("segment", &Case::segment, "chunks of a segment, if sequences are to be cut (CUDA)"),
      boolean("accept", &Case::accept, "recurrent: accept lengths"),
      integer("picked", &Case::picked,
              "recurrent: slots in a sequence's row of initial_state_indices, of which one is read"),
      choice("steps", &Case::steps, kSteps, "recurrent: per-step states: none dense pool rows"),
      integer("seed", &Case::seed, "of the random numbers"),
  };
  return all;
}

}  // namespace

void apply_spec(Case& c, std::string_view spec) {
  bool names_tokens = false;
  while (true) {
    const auto begin = spec.find_first_not_of(" \t\r\n");
    if (begin == spec.npos) return;
    spec.remove_prefix(begin);
    const auto word = spec.substr(0, spec.find_first_of(" \t\r\n"));
    spec.remove_prefix(word.size());
    const auto equals = word.find('=');
    const auto name = word.substr(0, equals);
    const auto value = equals == word.npos ? std::string_view("1") : word.substr(equals + 1);
    const auto& all = keys();
    const auto key = std::find_if(all.begin(), all.end(), [&](const Key& k) { return name == k.name; });
    if (key == all.end()) refuse("unknown key '" + std::string(name) + "' in a case");
    key->set(c, value);
    names_tokens |= name == "T";
    if (names_tokens && !c.lengths.empty()) refuse("T is given beside lengths: T follows from them, leave it out");
  }
}

Case parse_case(std::string_view spec) {
  Case c;
  apply_spec(c, spec);
  return c;
}

std::string describe(const Case& c) {
  static const Case defaults;
  std::string text;
  for (const Key& key : keys()) {
    const std::string name = key.name, value = key.get(c);
    if (!c.lengths.empty() && (name == "B" || name == "T")) continue;
    const bool always = name == "T" || name == "Hk" || name == "Hv" || name == "K" || name == "V" || name == "dtype";
    if (value == key.get(defaults) && !always) continue;
    if (!text.empty()) text += ' ';
    text.append(name).append("=").append(value);
  }
  return text;
}

const std::vector<std::pair<const char*, const char*>>& case_keys() {
  static const auto list = [] {
    std::vector<std::pair<const char*, const char*>> pairs;
    for (const Key& key : keys()) pairs.emplace_back(key.name, key.help);
    return pairs;
  }();
  return list;
}

void check_case(const Case& c) {
  const auto positive = [](const char* name, int64_t value) {
    if (value < 1) refuse(std::string(name) + " must be at least 1");
  };
  positive("Hk", c.Hk), positive("Hv", c.Hv), positive("K", c.K), positive("V", c.V), positive("B", c.B);
  if (c.Hv % c.Hk) refuse("Hv must be a multiple of Hk");
  if (c.T < 0 || c.pad < 0 || c.every < 0 || c.segment < 0) refuse("T, pad, every and segment must not be negative");
  if (c.lengths.empty() && c.pad) refuse("pad needs packed lengths");
  if (!c.lengths.empty() && c.B != 1) refuse("packed lengths need B=1");
  if (c.inplace && !(c.h0 && c.ht)) refuse("inplace needs h0 and ht");
  if (c.first_slot < 0 || c.picked < 0) refuse("first_slot and picked must not be negative");
  if ((c.first_slot || c.picked) && !(c.pool && c.h0)) refuse("first_slot and picked need pool and h0");
  if (c.offsets && c.every) refuse("offsets and every are two ways to place checkpoints");
  if (c.steps == StepKind::rows && c.lengths.empty()) refuse("steps=rows needs packed lengths");
  constexpr int64_t limit = int64_t{1} << 34;  // bytes of one tensor: catches slips of the keyboard
  if (c.lengths.size() > 1'000'000) refuse("more than a million sequences");
  for (const int64_t length : c.lengths) {
    if (length < 0) refuse("lengths must not be negative");
    if (length > limit) refuse("the case needs tensors of more than 16 GiB");
  }
  const auto fits = [](std::initializer_list<int64_t> sizes) {
    int64_t bytes = 4;
    for (const int64_t size : sizes) {
      if (size > 0 && bytes > limit / size) refuse("the case needs tensors of more than 16 GiB");
      bytes *= std::max<int64_t>(size, 1);
    }
  };
  if (c.pad > limit) fits({c.pad});
  const int64_t tokens = c.total_tokens();
  fits({c.B, tokens, std::max(c.Hk, c.Hv), std::max(c.K, c.V)});
  if (c.first_slot > limit || c.picked > limit) fits({c.first_slot, c.picked});
  fits({c.pool ? 2 * c.sequences() + 3 + c.first_slot : c.sequences(), c.Hv, c.K, c.V});
  fits({c.sequences(), c.picked});
  if (c.every > 0) fits({c.B, tokens / c.every, c.Hv, c.K, c.V});
  if (c.steps != StepKind::none) fits({c.B, tokens, c.Hv, c.K, c.V});
}

}  // namespace gatedelta::testing
