#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include "cli/options.hpp"
#include "testing/generator.hpp"

namespace gatedelta::cli {
namespace {

struct Command {
  const char* name;
  const char* words;  // what follows the flags
  const char* help;
  const std::vector<Flag>& flags;
  int (*run)(const std::vector<std::string>&);
};

const Command kCommands[] = {
    {"info", "", "what this library is and what this machine offers it", kInfoFlags, info_command},
    {"run", "", "time and verify the default job: a Qwen3.5-like layer, forward and backward", kRunFlags, run_command},
    {"check", " [key=value ...]", "compare any case with the fp64 recurrence; exit status 1 if one fails", kCheckFlags,
     check_command},
    {"bench", " [key=value ...]", "measure any case", kBenchFlags, bench_command},
};

void print_usage(std::FILE* to) {
  std::fprintf(to, "usage: gatedelta COMMAND [flags]\n\n");
  for (const Command& command : kCommands) std::fprintf(to, "  %-6s %s\n", command.name, command.help);
  std::fprintf(to, "\n'gatedelta COMMAND --help' lists a command's flags, 'gatedelta --version' prints the version.\n");
}

void print_usage(const Command& command) {
  std::printf("usage: gatedelta %s [flags]%s\n\n%s\n\n", command.name, command.words, command.help);
  for (const Flag& flag : command.flags) {
    const std::string left = std::string(flag.name) + (flag.value ? std::string(" ") + flag.value : "");
    std::printf("  %-16s %s\n", left.c_str(), flag.help);
  }
  if (!command.words[0]) return;
  std::printf(
      "\nKeys of a case (and columns of a csv file), each with a default; a bare key means key=1.\n"
      "Example: gatedelta %s T=130 Hk=2 Hv=4 K=64 V=32 dtype=bf16 gate=strong l2norm\n\n",
      command.name);
  for (const auto& [key, help] : testing::case_keys()) std::printf("  %-16s %s\n", key, help);
  std::printf("\nInputs are random, named by `seed`, and the same on every machine.\n");
}

int run_main(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    print_usage(stderr);
    return 2;
  }
  if (arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
    print_usage(stdout);
    return 0;
  }
  if (arguments[0] == "--version") {
    if (arguments.size() > 1) {
      std::fprintf(stderr, "gatedelta --version: '%s' is not understood\n", arguments[1].c_str());
      return 2;
    }
    std::printf("gatedelta %s\n", version_text(get_info()).c_str());
    return 0;
  }
  for (const Command& command : kCommands) {
    if (arguments[0] != command.name) continue;
    const std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
    for (const std::string& argument : rest) {
      if (argument != "--help" && argument != "-h") continue;
      print_usage(command);
      return 0;
    }
    try {
      return command.run(rest);
    } catch (const UsageError& e) {
      std::fprintf(stderr, "gatedelta %s: %s\nSee 'gatedelta %s --help'.\n", command.name, e.what(), command.name);
      return 2;
    }
  }
  std::fprintf(stderr, "gatedelta: unknown command '%s'\n\n", arguments[0].c_str());
  print_usage(stderr);
  return 2;
}

}  // namespace
}  // namespace gatedelta::cli

int main(int argc, char** argv) {
  try {
    const int status = gatedelta::cli::run_main({argv + 1, argv + argc});
    std::cout.flush();
    if (std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout) return status;
    std::fprintf(stderr, "gatedelta: cannot write to the standard output\n");
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "gatedelta: not enough memory\n");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gatedelta: %s\n", e.what());
  }
  return 2;
}
