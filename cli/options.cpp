#include "cli/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "testing/judge.hpp"

namespace gatedelta::cli {

Options::Options(const std::vector<std::string>& arguments, const std::vector<Flag>& flags, bool words) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.rfind("--", 0) != 0) {
      if (!words || argument.empty() || argument[0] == '-') throw UsageError("'" + argument + "' is not understood");
      if (!words_.empty()) words_ += ' ';
      words_ += argument;
      continue;
    }
    const auto equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return name == f.name; });
    if (flag == flags.end()) throw UsageError("unknown flag " + name);
    if (has(name)) throw UsageError(name + " is given twice");
    if (!flag->value) {
      if (equals != argument.npos) throw UsageError(name + " takes no value");
      values_.emplace_back(name, "");
    } else if (equals != argument.npos) {
      values_.emplace_back(name, argument.substr(equals + 1));
    } else if (i + 1 < arguments.size() && arguments[i + 1].rfind("--", 0) != 0) {
      values_.emplace_back(name, arguments[++i]);
    } else {
      throw UsageError(name + " needs a value");
    }
  }
}

std::optional<std::string> Options::get(const std::string& name) const {
  for (const auto& [each, value] : values_) {
    if (each == name) return value;
  }
  return std::nullopt;
}

int64_t Options::integer(const std::string& name, int64_t otherwise, int64_t lowest, int64_t highest) const {
  const auto text = get(name);
  if (!text) return otherwise;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < lowest || value > highest) {
    throw UsageError(name + " " + *text + ": expected a whole number from " + std::to_string(lowest) + " to " +
                     std::to_string(highest));
  }
  return value;
}

double Options::number(const std::string& name, double otherwise, double lowest, double highest) const {
  const auto text = get(name);
  if (!text) return otherwise;
  char* end = nullptr;
  const double value = std::strtod(text->c_str(), &end);
  if (text->empty() || *end || !(value >= lowest && value <= highest)) {
    std::ostringstream message;
    message << name << " " << *text << ": expected a number from " << lowest << " to " << highest;
    throw UsageError(message.str());
  }
  return value;
}

namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  if (parts.empty()) parts.push_back("");
  return parts;
}

constexpr std::pair<Op, const char*> kOps[] = {
    {Op::forward, "fwd"}, {Op::backward, "bwd"}, {Op::train, "train"}, {Op::recurrent, "rec"}};

}  // namespace

const char* name_of(Op op) {
  for (const auto& [each, name] : kOps) {
    if (each == op) return name;
  }
  return "?";
}

std::vector<Op> parse_ops(const std::string& list) {
  std::vector<Op> ops;
  for (const std::string& part : split(list)) {
    const auto found =
        std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& op) { return part == op.second; });
    if (found == std::end(kOps)) throw UsageError("unknown operation '" + part + "': expected fwd, bwd, train or rec");
    ops.push_back(found->first);
  }
  return ops;
}

std::vector<gd_isa> parse_isas(const std::string& list) {
  if (list == "all") return testing::usable_isas();
  auto choices = testing::usable_isas();
  choices.insert(choices.begin(), GD_ISA_AUTO);
  std::vector<gd_isa> isas;
  for (const std::string& part : split(list)) {
    const auto found =
        std::find_if(choices.begin(), choices.end(), [&](gd_isa isa) { return part == gd_isa_name(isa); });
    if (found == choices.end()) {
      std::string message = "instruction set '" + part + "' cannot run here: expected all";
      for (const gd_isa isa : choices) message.append(", ").append(gd_isa_name(isa));
      throw UsageError(message);
    }
    isas.push_back(*found);
  }
  return isas;
}

gd_info get_info() {
  gd_info info{};
  info.struct_size = sizeof info;
  if (gd_get_info(&info) != GD_OK) throw std::runtime_error(gd_last_error());
  return info;
}

std::string version_text(const gd_info& info) {
  char text[64];
  std::snprintf(text, sizeof text, "%d.%d.%d", info.version_major, info.version_minor, info.version_patch);
  return text;
}

gd_isa resolve(gd_isa isa) { return isa == GD_ISA_AUTO ? static_cast<gd_isa>(get_info().cpu_isa_best) : isa; }

Pool::Pool(int threads) {
  if (gd_thread_pool_create(threads, &pool_) != GD_OK) throw std::runtime_error(gd_last_error());
}

}  // namespace gatedelta::cli
