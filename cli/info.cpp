#include <cstdio>

#include "cli/device.hpp"
#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/timing.hpp"

namespace gatedelta::cli {

const std::vector<Flag> kInfoFlags = {
    {"--json", "FILE", "write the same as JSON (- = standard output, nothing else is printed)"}};

namespace {

std::string isa_list(int bits, const char* separator) {
  std::string list;
  for (int isa = 1; isa < GD_ISA_COUNT; ++isa) {
    if (bits >> isa & 1) list += (list.empty() ? "" : separator) + std::string(gd_isa_name(isa));
  }
  return list;
}

Json isa_array(int bits) {
  Json array = Json::array();
  for (int isa = 1; isa < GD_ISA_COUNT; ++isa) {
    if (bits >> isa & 1) array.add(gd_isa_name(isa));
  }
  return array;
}

}  // namespace

int info_command(const std::vector<std::string>& arguments) {
  const Options options(arguments, kInfoFlags, false);
  const gd_info info = get_info();
  const std::vector<Gpu> devices = gpus();
  char version[64];
  std::snprintf(version, sizeof version, "%d.%d.%d", info.version_major, info.version_minor, info.version_patch);
  if (const auto path = options.get("--json")) {
    Json names = Json::array();
    for (const Gpu& gpu : devices) names.add(gpu.name);
    Json::object()
        .set("version", version)
        .set("abi", info.abi_version)
        .set("machine", machine_json())
        .set("isas_compiled", isa_array(info.cpu_isa_compiled))
        .set("isas_usable", isa_array(info.cpu_isa_usable))
        .set("cuda_compiled", info.cuda_compiled != 0)
        .set("cuda_devices", info.cuda_devices)
        .set("gpus", names)
        .write(*path);
    if (*path == "-") return 0;
  }
  std::printf("gatedelta        %s (ABI %d)\n", version, info.abi_version);
  std::printf("backends         cpu%s\n", info.cuda_compiled ? ", cuda" : "");
  std::printf("instruction sets %s\n", isa_list(info.cpu_isa_compiled, ", ").c_str());
  std::printf("usable here      %s\n", isa_list(info.cpu_isa_usable, ", ").c_str());
  std::printf("best here        %s (for bf16 inputs)\n", gd_isa_name(info.cpu_isa_best));
  std::printf("CPUs             %d\n", info.cpu_count);
  if (!info.cuda_compiled) {
    std::printf("GPUs             none: this build has no CUDA backend\n");
  } else if (devices.empty()) {
    std::printf("GPUs             none\n");
  } else {
    std::printf("GPUs             %zu, of which %d supported\n", devices.size(), info.cuda_devices);
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto& [name, major, minor] = devices[i];
    std::printf("  cuda:%-9zu %s, compute capability %d.%d\n", i, name.c_str(), major, minor);
  }
  return 0;
}

}  // namespace gatedelta::cli
