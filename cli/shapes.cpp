#include "cli/shapes.hpp"

#include <fstream>
#include <sstream>

namespace gatedelta::cli {

namespace {

std::string trim(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r");
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> result;
  std::string cell;
  std::istringstream stream(line);
  while (std::getline(stream, cell, ',')) result.push_back(trim(cell));
  if (!line.empty() && line.back() == ',') result.emplace_back();
  return result;
}

void set_words(testing::Case& c, const std::string& words) {
  try {
    testing::apply_spec(c, words);
  } catch (const std::invalid_argument& e) {
    throw UsageError(e.what());
  }
}

Shape read_row(const std::vector<std::string>& columns, const std::vector<std::string>& row) {
  if (row.size() > columns.size()) throw UsageError("more cells than columns");
  Shape shape;
  std::string words;
  for (size_t i = 0; i < row.size(); ++i) {
    if (row[i].empty()) continue;
    if (columns[i] == "name") {
      shape.name = row[i];
    } else if (columns[i] == "op") {
      std::string list = row[i];  // the comma is taken: fwd+bwd
      for (char& c : list) c = c == '+' ? ',' : c;
      shape.ops = parse_ops(list);
    } else if (row[i].find_first_of(" \t") != std::string::npos) {
      throw UsageError("a space inside '" + row[i] + "'");
    } else {
      words.append(" ").append(columns[i]).append("=").append(row[i]);
    }
  }
  set_words(shape.spec, words);
  return shape;
}

}  // namespace

std::vector<Shape> read_shapes(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw UsageError("cannot read " + path);
  std::vector<std::string> columns;
  std::vector<Shape> shapes;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    line = trim(line);
    if (line.empty() || line[0] == '#') continue;
    try {
      if (columns.empty()) {
        columns = cells(line);
        for (const std::string& column : columns) {
          bool known = column == "name" || column == "op";
          for (const auto& [key, help] : testing::case_keys()) known |= column == key;
          if (!known) throw UsageError("unknown column '" + column + "'");
        }
        continue;
      }
      shapes.push_back(read_row(columns, cells(line)));
      if (shapes.back().name.empty()) shapes.back().name = "line " + std::to_string(number);
    } catch (const UsageError& e) {
      throw UsageError(path + ":" + std::to_string(number) + ": " + e.what());
    }
  }
  if (file.bad()) throw UsageError("cannot read " + path);
  if (shapes.empty()) throw UsageError(path + ": no shapes in it");
  return shapes;
}

std::vector<Shape> chosen_shapes(const Options& options, const std::vector<Shape>& otherwise) {
  std::vector<Shape> shapes;
  if (const auto path = options.get("--shapes")) {
    shapes = read_shapes(*path);
  } else if (!options.words().empty()) {
    shapes.push_back({"", {}, {}});
  } else {
    return otherwise;
  }
  for (Shape& shape : shapes) set_words(shape.spec, options.words());
  return shapes;
}

std::vector<Op> chosen_ops(const Options& options, const Shape& shape, const std::vector<Op>& otherwise) {
  if (const auto list = options.get("--op")) return parse_ops(*list);
  return shape.ops.empty() ? otherwise : shape.ops;
}

}  // namespace gatedelta::cli
