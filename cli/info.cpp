#include <cstdio>

#include "cli/device.hpp"
#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "cli/timing.hpp"

namespace gatedelta::cli {

const std::vector<Flag> kInfoFlags = {
    {"--json", "FILE", "write the same as JSON (- = standard output, without the lines)"}};

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

// The kernels that run on a GPU, in words.
const char* kernels_of(const Gpu& gpu) {
  if (gpu.major < 8) return "nothing runs there";
  return gpu.major == 9 ? "every operation; portable kernels where K or V is not 128"
                        : "every operation; portable kernels";
}

}  // namespace

int info_command(const std::vector<std::string>& arguments) {
  const Options options(arguments, kInfoFlags, false);
  const Report report(options);
  const gd_info info = get_info();
  const std::vector<Gpu> devices = gpus();
  Json names = Json::array();
  Json kernels = Json::array();
  for (const Gpu& gpu : devices) {
    names.add(gpu.name);
    kernels.add(kernels_of(gpu));
  }
  report.write(Json::object()
                   .set("version", version_text(info))
                   .set("abi", info.abi_version)
                   .set("machine", machine_json())
                   .set("isas_compiled", isa_array(info.cpu_isa_compiled))
                   .set("isas_usable", isa_array(info.cpu_isa_usable))
                   .set("cuda_compiled", info.cuda_compiled != 0)
                   .set("cuda_devices", info.cuda_devices)
                   .set("gpus", names)
                   .set("gpu_kernels", kernels));
  report.print("gatedelta        %s (ABI %d)\n", version_text(info).c_str(), info.abi_version);
  report.print("backends         cpu%s\n", info.cuda_compiled ? ", cuda" : "");
  report.print("instruction sets %s\n", isa_list(info.cpu_isa_compiled, ", ").c_str());
  report.print("usable here      %s\n", isa_list(info.cpu_isa_usable, ", ").c_str());
  report.print("best here        %s (for bf16 inputs)\n", gd_isa_name(info.cpu_isa_best));
  report.print("CPUs             %d\n", info.cpu_count);
  if (!info.cuda_compiled) {
    report.print("GPUs             none: this build has no CUDA backend\n");
  } else if (devices.empty()) {
    report.print("GPUs             none\n");
  } else {
    report.print("GPUs             %zu, of which %d run every operation\n", devices.size(), info.cuda_devices);
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto& [name, major, minor] = devices[i];
    report.print("  cuda:%-9zu %s, compute capability %d.%d: %s\n", i, name.c_str(), major, minor,
                 kernels_of(devices[i]));
  }
  return 0;
}

}  // namespace gatedelta::cli
