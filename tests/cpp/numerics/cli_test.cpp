// The command line tool as a user meets it: what it prints, how it exits, and that bad input never hurts.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "cli/device.hpp"
#include "cli/timing.hpp"

namespace {

struct Result {
  int status;
  std::string output;  // both streams, unless redirected
};

Result gatedelta(const std::string& arguments, const std::string& redirection = "2>&1",
                 const std::string& environment = "") {
  std::FILE* pipe = popen((environment + " " GD_CLI_COMMAND " " + arguments + " " + redirection).c_str(), "r");
  if (!pipe) return {-1, "cannot start " GD_CLI_COMMAND};
  std::string output;
  char buffer[4096];
  while (const size_t size = std::fread(buffer, 1, sizeof buffer, pipe)) output.append(buffer, size);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
}

// Without the leak checker, which takes 4 s of every process on aarch64: commands that do run are checked for leaks.
void expect_refused(const std::string& arguments, const std::string& message) {
  const Result r = gatedelta(arguments, "2>&1", "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0");
  EXPECT_EQ(r.status, 2) << arguments << "\n" << r.output;
  EXPECT_NE(r.output.find(message), std::string::npos) << arguments << " said:\n" << r.output;
}

std::string temporary(const std::string& name, const std::string& contents) {
  const std::string path = testing::TempDir() + "gatedelta_cli_" + std::to_string(getpid()) + "_" + name;
  std::ofstream(path, std::ios::binary) << contents;
  return path;
}

std::string slurp(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(Cli, ExplainsHowSequencesAreCut) {
  const Result cut = gatedelta("bench --explain T=32768 Hk=2 Hv=8");
  EXPECT_EQ(cut.status, 0);
  EXPECT_NE(cut.output.find("1 sequences of 8 value heads on 132 blocks"), std::string::npos) << cut.output;
  EXPECT_NE(cut.output.find("1 of 4 "), std::string::npos) << cut.output;
  const Result even = gatedelta("bench --explain --blocks 64 B=16 T=1500 Hk=4 Hv=4");
  EXPECT_NE(even.output.find("not cut: heads of one length keep the GPU busy"), std::string::npos) << even.output;
  EXPECT_NE(gatedelta("bench --explain lengths=100x50 Hk=1 Hv=1").output.find("longest first"), std::string::npos);
  EXPECT_NE(gatedelta("bench --explain lengths=0 Hk=1 Hv=1").output.find("not cut"), std::string::npos);
  EXPECT_NE(gatedelta("bench --explain lengths=9+200+16+2x3 Hk=1 Hv=1 layout=vk")
                .output.find("4 sequences of at most 16 tokens run in the kernel for short sequences"),
            std::string::npos);
  EXPECT_NE(gatedelta("bench --explain lengths=200+400 Hk=1 Hv=1").output.find("too short for it, in halves"),
            std::string::npos);
  EXPECT_NE(gatedelta("bench --explain T=640 segment=3").output.find("segments of 3 chunks"), std::string::npos);
  for (const char* refused : {"lengths=100x5 Hk=1 Hv=1 segment=3", "T=128000 Hk=2 Hv=4 segment=1"})
    EXPECT_NE(gatedelta(std::string("bench --explain ") + refused).output.find("refused: "), std::string::npos);
  expect_refused("bench --explain --threads 2", "--explain runs nothing: leave out --threads");
  expect_refused("bench --blocks 2 T=1", "--blocks is for --explain");
}

TEST(Cli, ExitStatus) {
  expect_refused("check K=17", "K is 17, must be a multiple of 16");  // not 1: numerics are not wrong
  for (const char* command : {"info", "info --json -", "--version", "check --op fwd T=1 K=16 V=16"})
    EXPECT_EQ(gatedelta(command, ">/dev/full").status, 2) << command;
}

TEST(Cli, SweepsRandomCases) {
  const Result sweep = gatedelta("check --sweep 6 --seed 3 --op fwd,bwd --isa generic --threads 2");
  EXPECT_EQ(sweep.status, 0) << sweep.output;
  EXPECT_NE(sweep.output.find("6 cases, ok"), std::string::npos) << sweep.output;
  EXPECT_EQ(gatedelta("check --sweep 6 --seed 3 --op fwd,bwd --isa generic --threads 1").output, sweep.output);
  const Result fixed = gatedelta("check --sweep 2 --op fwd --isa generic --verbose T=5 Hk=1 Hv=1 K=16 V=16 dtype=fp32");
  EXPECT_NE(fixed.output.find("generic fwd fp32"), std::string::npos) << fixed.output;
  EXPECT_EQ(fixed.output.find("bf16  "), std::string::npos) << fixed.output;
  expect_refused("check --sweep 0", "--sweep 0: expected a whole number from 1");
  expect_refused("check --sweep 2 --verify 1", "--verify has no meaning beside --sweep");
  expect_refused("check --seed 2", "--seed is of --sweep");
  expect_refused("check --sweep 2 K=0", "K must be at least 1");
}

TEST(Cli, Help) {
  EXPECT_EQ(gatedelta("").status, 2);
  for (const std::string command : {"", "info ", "run ", "check ", "bench "}) {
    const Result r = gatedelta(command + "--help");
    EXPECT_EQ(r.status, 0) << command;
    EXPECT_EQ(r.output.rfind("usage: gatedelta", 0), 0u) << r.output;
  }
  EXPECT_NE(gatedelta("check --help").output.find("--shapes FILE"), std::string::npos);
  EXPECT_NE(gatedelta("check --help").output.find("lengths"), std::string::npos);
}

TEST(Cli, Version) {
  const gd_info info = gatedelta::cli::get_info();
  const Result r = gatedelta("--version");
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.output, "gatedelta " + gatedelta::cli::version_text(info) + "\n");
  EXPECT_EQ(gatedelta::cli::version_text(info), GD_PROJECT_VERSION);
  expect_refused("--version extra", "'extra' is not understood");
}

TEST(Cli, RefusesBadArguments) {
  expect_refused("frobnicate", "unknown command 'frobnicate'");
  expect_refused("info extra", "'extra' is not understood");
  expect_refused("check --frobnicate", "unknown flag --frobnicate");
  expect_refused("check --isa", "--isa needs a value");
  expect_refused("check --isa sse9", "'sse9' cannot run here");
  expect_refused("check --kernels portable", "--kernels is for CUDA alone");
  expect_refused("check --device cuda --kernels hopper", "--kernels hopper: expected auto or portable");
  expect_refused("check --op fwd,sideways", "unknown operation 'sideways'");
  expect_refused("check --verbose=1", "--verbose takes no value");
  expect_refused("check --threads 1 --threads 2", "--threads is given twice");
  expect_refused("check T=many", "T=many: not a whole number");
  expect_refused("check dtype=fp8", "expected one of fp32, bf16, fp16");
  expect_refused("check colour=red", "unknown key 'colour'");
  expect_refused("check Hk=2 Hv=3", "Hv must be a multiple of Hk");
  for (const std::string words : {"T=9 lengths=3+4", "lengths=3+4 T=9"})
    expect_refused("check " + words, "T is given beside lengths");
  expect_refused("bench T=99999999999", "more than 16 GiB");
  expect_refused("bench --seconds never", "expected a number");
  expect_refused("run --threads 0", "expected a whole number from 1");
  expect_refused("run --isa all", "one instruction set");
  for (const std::string device : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "cuda:1:2"}) {
    expect_refused("check --device " + device, "--device " + device + ": expected cpu, cuda or cuda:N");
  }
}

TEST(Cli, RefusesAnUnwritableFileBeforeItRuns) {
  for (const std::string command : {"info", "run", "check", "bench"}) {
    const std::string arguments = command + " --json /no/such/folder/x.json";
    expect_refused(arguments, "cannot write /no/such/folder/x.json");
    EXPECT_EQ(gatedelta(arguments, "2>/dev/null").output, "") << command;
  }
  const std::string path = temporary("kept.json", "older results");
  expect_refused("bench T=99999999999 --json " + path, "more than 16 GiB");
  EXPECT_EQ(slurp(path), "older results");
}

TEST(Cli, JsonOnTheStandardOutputIsAllThereIs) {
  for (const std::string command : {"check --isa generic", "bench --seconds 0"}) {
    const Result r = gatedelta(command + " T=64 K=16 V=16 --op fwd --threads 1 --json -");
    EXPECT_EQ(r.status, 0) << r.output;
    EXPECT_EQ(r.output.substr(0, 2), "{\n") << r.output;
    EXPECT_EQ(r.output.substr(r.output.size() - 3), "\n}\n") << r.output;
  }
  const std::string refused = "bench T=64 K=20 --seconds 0 --op fwd --json -";
  EXPECT_NE(gatedelta(refused, "2>&1 >/dev/null").output.find("K is 20"), std::string::npos);
  EXPECT_EQ(gatedelta(refused, "2>/dev/null").output.front(), '{');
}

TEST(Cli, RefusesBadFiles) {
  expect_refused("check --shapes /no/such/file", "cannot read /no/such/file");
  expect_refused("check --shapes /", "");
  expect_refused("check --shapes " + temporary("empty.csv", ""), "no shapes in it");
  expect_refused("check --shapes " + temporary("head.csv", "name,T\n# nothing\n"), "no shapes in it");
  expect_refused("check --shapes " + temporary("column.csv", "name,Tokens\na,1\n"), ":1: unknown column 'Tokens'");
  expect_refused("check --shapes " + temporary("cells.csv", "# c\nname,T\na,1,2\n"), ":3: more cells than columns");
  expect_refused("check --shapes " + temporary("value.csv", "name,T\na,\nb,1x\n"), ":3: T=1x: not a whole number");
  expect_refused("check --shapes " + temporary("space.csv", "name,T\nb,1 dtype=bf16\n"), ":2: a space inside");
  const std::string packed = temporary("packed.csv", "name,T,lengths\na,,3+4\n");
  expect_refused("check T=9 --shapes " + packed, "T is given beside lengths");
  expect_refused("check --shapes " + temporary("both.csv", "name,T,lengths\na,9,3+4\n"),
                 ":2: T is given beside lengths");
  expect_refused("check --shapes " + temporary("noise.csv", std::string("\0\xff\x80,,\n\1\2\3", 9)), "unknown column");
}

TEST(Cli, Info) {
  const Result r = gatedelta("info");
  EXPECT_EQ(r.status, 0);
  for (const char* text : {"gatedelta ", "backends ", "usable here ", "generic", "best here ", "CPUs ", "GPUs "}) {
    EXPECT_NE(r.output.find(text), std::string::npos) << text;
  }
  const Result json = gatedelta("info --json -");
  EXPECT_EQ(json.output.front(), '{');
  EXPECT_NE(json.output.find("\"isas_usable\": ["), std::string::npos);
}

TEST(Cli, Check) {
  const std::string csv = temporary("check.csv",
                                    "name,op,T,lengths,Hv,K,V,dtype\nshort,fwd+bwd,70,,2,16,32,bf16\n"
                                    "packed,rec,,3+0+1,,16,16,\n");
  const Result r =
      gatedelta("check --isa generic,auto --threads 2 --shapes " + csv + " seed=4 --json " + csv + ".json");
  EXPECT_EQ(r.status, 0) << r.output;
  EXPECT_NE(r.output.find("8 calls checked, 0 failed"), std::string::npos) << r.output;
  EXPECT_NE(r.output.find("short: T=70 Hk=1 Hv=2 K=16 V=32 dtype=bf16 seed=4"), std::string::npos) << r.output;
  const std::string json = slurp(csv + ".json");
  EXPECT_NE(json.find("\"failures\": 0"), std::string::npos) << json;
  EXPECT_NE(json.find("\"quantity\": \"dbeta\""), std::string::npos) << json;
}

TEST(Cli, CheckFailsOnWhatTheLibraryRefuses) {
  const Result r = gatedelta("check T=5 K=16 V=16 every=100 --isa generic --op fwd,bwd");
  EXPECT_EQ(r.status, 1);
  EXPECT_NE(r.output.find("checkpoint_every is 100"), std::string::npos) << r.output;
  EXPECT_NE(r.output.find("3 calls checked, 2 failed"), std::string::npos) << r.output;
}

TEST(Cli, Bench) {
  const std::string path = temporary("bench.json", "");
  const Result r =
      gatedelta("bench T=64 K=16 V=16 --op fwd,bwd,train,rec --seconds 0 --scaling --threads 2 --json " + path);
  EXPECT_EQ(r.status, 0) << r.output;
  const std::string json = slurp(path);
  for (const char* text :
       {"\"op\": \"train\"", "\"threads\": 1", "\"threads\": 2", "\"state_gbytes_per_s\"", "\"gflops\""}) {
    EXPECT_NE(json.find(text), std::string::npos) << text << " in\n" << json;
  }
  const Result refused = gatedelta("bench T=64 K=20 --seconds 0");
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.output.find("K is 20"), std::string::npos) << refused.output;
}

TEST(Cli, Run) {
  const std::string path = temporary("run.json", "");
  const Result r = gatedelta("run --tokens 300 --seconds 0 --verify 1 --threads 2 --json " + path);
  EXPECT_EQ(r.status, 0) << r.output;
  for (const char* text :
       {"tokens/s", "GFLOP/s", "error against the fp64 recurrence", "value heads 0 to 1 of 32", "checksum"}) {
    EXPECT_NE(r.output.find(text), std::string::npos) << text << " in\n" << r.output;
  }
  EXPECT_NE(slurp(path).find("\"checksum_backward\""), std::string::npos);
  // The same inputs give the same bits, whatever the thread count.
  const Result again = gatedelta("run --tokens 300 --seconds 0 --verify 1 --threads 1");
  const auto sum = [](const std::string& text) { return text.substr(text.find("checksum"), 60); };
  EXPECT_EQ(sum(r.output), sum(again.output));
}

TEST(Cli, RefusesCudaWhereThereIsNone) {
  const gd_info info = gatedelta::cli::get_info();
  if (!gatedelta::cli::gpus().empty()) GTEST_SKIP() << "there is a CUDA device";
  const std::string reason = info.cuda_compiled ? "there is no CUDA device here" : "this build has no CUDA backend";
  for (const std::string command : {"check", "run", "bench"}) {
    expect_refused(command + " --device cuda", "--device cuda: " + reason);
    expect_refused(command + " --device cuda:1 --isa auto", "--device cuda:1: " + reason);
    EXPECT_NE(gatedelta(command + " --help").output.find("--device NAME"), std::string::npos);
  }
}

TEST(Cli, RefusesCudaDevicesThatNothingRunsOn) {
  using gatedelta::cli::refusal;
  const std::vector<gatedelta::cli::Gpu> gpus = {{"T4", 7, 5}, {"A100", 8, 0}, {"H200", 9, 0}};
  EXPECT_EQ(refusal(0, {}), "there is no CUDA device here");
  EXPECT_EQ(refusal(3, gpus), "there is no such CUDA device, the last is cuda:2");
  EXPECT_EQ(refusal(0, gpus), "T4 has compute capability 7.5, but the library needs 8.0");
  EXPECT_EQ(refusal(1, gpus) + refusal(2, gpus), "");  // an A100 decodes
}

TEST(Cli, Cuda) {
  if (gatedelta::cli::get_info().cuda_devices == 0) GTEST_SKIP() << "no CUDA device of compute capability 8.0 or later";
  EXPECT_NE(gatedelta("info").output.find("cuda:0 "), std::string::npos);
  expect_refused("check --device cuda:1000", "--device cuda:1000: there is no such CUDA device");
  expect_refused("check --device cuda --isa amx", "--isa is for the CPU alone");
  expect_refused("bench --device cuda --scaling", "--scaling is for the CPU alone");

  const Result check = gatedelta("check --device cuda T=70 Hv=2 K=128 V=128 dtype=bf16 --op fwd,bwd,rec");
  EXPECT_EQ(check.status, 0) << check.output;
  for (const char* text : {"ok     fwd        cuda:0", "ok     bwd        cuda:0", "ok     rec        cuda:0",
                           "3 calls checked, 0 failed"})
    EXPECT_NE(check.output.find(text), std::string::npos) << text << " in\n" << check.output;
  EXPECT_EQ(gatedelta("check --device cuda T=70 K=64 V=64 dtype=bf16").status, 0);
  const Result refused = gatedelta("check --device cuda T=70 K=64 V=64 dtype=bf16 segment=1");
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.output.find("K is 64, must be 128 on CUDA"), std::string::npos) << refused.output;
  EXPECT_EQ(gatedelta("check --device cuda").status, 0);

  const std::string path = temporary("cuda.json", "");
  const Result bench = gatedelta("bench --device cuda:0 T=640 K=128 V=128 dtype=fp16 --seconds 0 --json " + path);
  EXPECT_EQ(bench.status, 0) << bench.output;
  for (const char* text : {"\"gpu\": ", "\"device\": \"cuda:0\"", "\"median_ms\": ", "\"gflops\": "})
    EXPECT_NE(slurp(path).find(text), std::string::npos) << text << " in\n" << slurp(path);
  for (const std::string op : {"bwd", "train", "rec"})
    EXPECT_EQ(gatedelta("bench --device cuda T=640 K=128 V=128 dtype=bf16 --seconds 0 --op " + op).status, 0) << op;
  const Result decode = gatedelta("bench --device cuda B=4 T=1 K=128 V=128 dtype=bf16 inplace --seconds 0 --op rec");
  EXPECT_EQ(decode.status, 0) << decode.output;

  const Result run = gatedelta("run --device cuda --tokens 300 --seconds 0 --verify 1");
  EXPECT_EQ(run.status, 0) << run.output;
  for (const char* text : {"forward ", "backward ", "dA_log ", "value heads 0 to 1 of 32", "all within bounds"})
    EXPECT_NE(run.output.find(text), std::string::npos) << text << " in\n" << run.output;
}

TEST(Machine, NamesTheCpu) {
  const auto name = [](const char* text) {
    std::istringstream cpuinfo(text);
    return gatedelta::cli::cpu_name(cpuinfo);
  };
  EXPECT_EQ(name("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nCPU part\t: 0xd40\n"), "A CPU @ 2 GHz");
  EXPECT_EQ(name("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nCPU part\t: 0xd0c\n"), "Neoverse-V1");
  EXPECT_EQ(name("CPU part\t: 0xabc\n"), "part 0xabc");
  EXPECT_EQ(name(""), "unknown");
}

TEST(Cost, CountsTheProductsOfTheChunkForms) {
  using gatedelta::cli::Op;
  const double unit = 2.0 * 64 * 64 * 128;
  const auto c = gatedelta::testing::parse_case("T=640 Hk=1 Hv=3 K=128 V=128");
  EXPECT_DOUBLE_EQ(gatedelta::cli::flops_of(Op::forward, c), 10.5 * unit * 30);
  EXPECT_DOUBLE_EQ(gatedelta::cli::flops_of(Op::backward, c), 29 * unit * 30);
  EXPECT_DOUBLE_EQ(gatedelta::cli::flops_of(Op::train, c), 39.5 * unit * 30);
  const auto packed = gatedelta::testing::parse_case("lengths=600+40 pad=99 Hk=1 Hv=3 K=128 V=128 state=bf16");
  EXPECT_DOUBLE_EQ(gatedelta::cli::flops_of(Op::forward, packed), 10.5 * unit * 30);
  EXPECT_DOUBLE_EQ(gatedelta::cli::state_bytes_of(packed), 2.0 * 3 * 128 * 128 * 2 * 2);
}

}  // namespace
