// The convolution's cases as lines of text.
#include <algorithm>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "testing/conv1d.hpp"

namespace gatedelta::testing {

int64_t ConvCase::tokens() const { return lengths.empty() ? T : std::accumulate(lengths.begin(), lengths.end(), pad); }
int64_t ConvCase::longest() const { return lengths.empty() ? T : *std::max_element(lengths.begin(), lengths.end()); }

namespace {

constexpr std::pair<const char*, gd_dtype> kTypes[] = {{"fp32", GD_F32}, {"bf16", GD_BF16}, {"fp16", GD_F16}};

gd_dtype dtype_from(const std::string& name) {
  for (const auto& [text, dtype] : kTypes) {
    if (name == text) return dtype;
  }
  throw std::invalid_argument("dtype '" + name + "' is none of fp32, bf16, fp16");
}
const char* name_of(gd_dtype dtype) {
  for (const auto& [text, each] : kTypes) {
    if (each == dtype) return text;
  }
  return "none";
}

// Calls visit(name, member) for every key; one list for parsing and printing.
template <class Case, class Visit>
void for_each_key(Case& c, Visit&& visit) {
  visit("B", c.B);
  visit("T", c.T);
  visit("lengths", c.lengths);
  visit("pad", c.pad);
  visit("D", c.D);
  visit("W", c.W);
  visit("S", c.S);
  visit("final_S", c.final_S);
  visit("dtype", c.dtype);
  visit("odtype", c.odtype);
  visit("wdtype", c.wdtype);
  visit("state", c.state);
  visit("channel_major", c.channel_major);
  visit("state_tokens_first", c.state_tokens_first);
  visit("bias", c.bias);
  visit("silu", c.silu);
  visit("h0", c.h0);
  visit("ht", c.ht);
  visit("pool", c.pool);
  visit("inplace", c.inplace);
  visit("drafts", c.drafts);
  visit("steps", c.steps);
  visit("null_slot", c.null_slot);
  visit("i64", c.i64);
  visit("strided", c.strided);
  visit("seed", c.seed);
}

void assign(int64_t& to, const std::string& text) { to = std::stoll(text); }
void assign(uint64_t& to, const std::string& text) { to = std::stoull(text); }
void assign(bool& to, const std::string& text) { to = std::stoi(text) != 0; }
void assign(gd_dtype& to, const std::string& text) { to = dtype_from(text); }
void assign(std::vector<int64_t>& to, const std::string& text) {
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, '+');) to.push_back(std::stoll(part));
}

std::string text_of(int64_t x) { return std::to_string(x); }
std::string text_of(uint64_t x) { return std::to_string(x); }
std::string text_of(bool x) { return x ? "1" : "0"; }
std::string text_of(gd_dtype x) { return name_of(x); }
std::string text_of(const std::vector<int64_t>& x) {
  std::string text;
  for (const int64_t each : x) {
    if (!text.empty()) text += '+';
    text += std::to_string(each);
  }
  return text;
}

}  // namespace

ConvCase parse_conv_case(std::string_view spec) {
  ConvCase c;
  std::stringstream words{std::string(spec)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == word.npos ? "1" : word.substr(equals + 1);
    bool known = false;
    for_each_key(c, [&](const char* name, auto& member) {
      if (key != name) return;
      assign(member, value);
      known = true;
    });
    if (!known) throw std::invalid_argument("there is no key '" + key + "'");
  }
  return c;
}

std::string describe(const ConvCase& c) {
  const ConvCase defaults;
  std::vector<std::string> plain;
  for_each_key(defaults, [&](const char*, const auto& member) { plain.push_back(text_of(member)); });
  std::string text;
  size_t i = 0;
  for_each_key(c, [&](const char* name, const auto& member) {
    const std::string value = text_of(member);
    if (value == plain[i++]) return;
    if (!text.empty()) text += ' ';
    text.append(name).append("=").append(value);
  });
  return text;
}

}  // namespace gatedelta::testing
