// Just enough JSON to write results: objects and arrays, in order, two spaces of indentation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

namespace gatedelta::cli {

class Json {
 public:
  static Json object() { return Json('{'); }
  static Json array() { return Json('['); }

  template <class T>
  Json& set(const std::string& key, const T& value) {
    items_.push_back(quote(key) + ": " + render(value));
    return *this;
  }
  template <class T>
  Json& add(const T& value) {
    items_.push_back(render(value));
    return *this;
  }

  std::string text() const {
    if (items_.empty()) return kind_ == '{' ? "{}" : "[]";
    std::string result(1, kind_);
    for (size_t i = 0; i < items_.size(); ++i) {
      result += i ? ",\n" : "\n";
      result += "  ";
      for (const char c : items_[i]) {
        result += c;
        if (c == '\n') result += "  ";  // strings hold no raw line ends
      }
    }
    result += '\n';
    result += kind_ == '{' ? '}' : ']';
    return result;
  }

 private:
  explicit Json(char kind) : kind_(kind) {}

  static std::string render(const Json& value) { return value.text(); }
  static std::string render(const std::string& value) { return quote(value); }
  static std::string render(const char* value) { return quote(value); }
  static std::string render(bool value) { return value ? "true" : "false"; }
  template <class T>
  requires std::is_integral_v<T>
  static std::string render(T value) { return std::to_string(value); }
  static std::string render(double value) {
    if (!std::isfinite(value)) return "null";
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%.6g", value);
    return buffer;
  }
  static std::string quote(const std::string& value) {
    std::string result = "\"";
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        result += '\\';
        result += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char buffer[8];
        std::snprintf(buffer, sizeof buffer, "\\u%04x", c);
        result += buffer;
      } else {
        result += c;
      }
    }
    return result + '"';
  }

  char kind_;
  std::vector<std::string> items_;
};

}  // namespace gatedelta::cli
