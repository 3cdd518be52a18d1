// Rules about where and with what a call runs, and about the argument structs themselves.
#include <stdexcept>
#include <thread>

#include "cases.hpp"

namespace gatedelta::test {

template <class Operation>
class Exec : public testing::Test {
 protected:
  Operation c;
};
TYPED_TEST_SUITE(Exec, Operations);

#define RULE(name) TYPED_TEST(Exec, name)
#define CALL auto& c = this->c

void in_turn(void*, int64_t count, gd_task_fn run, void* task) {
  for (int64_t i = 0; i < count; ++i) run(task, i);
}

RULE(Rules) {
  check_rules<TypeParam>({
      {"UnknownDevice", [](auto& c) { c.exec.device = 2; }, "device is 2, must be from 0 to 1"},
      {"DeviceIndex", [](auto& c) { c.exec.device_index = 1; }, "device_index is 1, must be 0 on the CPU"},
      {"Stream", [](auto& c) { c.exec.stream = &c; }, "stream must be null on the CPU"},
      {"KernelsAreOfCuda", [](auto& c) { c.exec.kernels = GD_KERNELS_PORTABLE; },
       "kernels must be auto on the CPU: it selects CUDA kernels"},
      {"UnknownIsa", [](auto& c) { c.exec.isa = GD_ISA_COUNT; }, "isa is 8, must be from 0 to 7"},
      {"ThreadCountRange", [](auto& c) { c.exec.parallel_for = in_turn, c.exec.num_threads = -1; },
       "num_threads is -1, must be from 0 to 1024"},
      {"", [](auto& c) { c.exec.num_threads = 1025; }, "num_threads is 1025, must be from 0 to 1024"},
      {"ThreadsWithoutParallelFor", [](auto& c) { c.exec.num_threads = 2; },
       "num_threads is 2, but parallel_for is null: make a gd_thread_pool"},
      {"", [](auto& c) { c.exec.num_threads = 1; }},
      {"ContextWithoutParallelFor", [](auto& c) { c.exec.parallel_for_context = &c; },
       "parallel_for_context is given, but parallel_for is null"},
      {"PoolFunctionWithoutPool", [](auto& c) { c.exec.parallel_for = gd_thread_pool_parallel_for; },
       "parallel_for_context is null: pass the pool"},
      {"ReservedExec", [](auto& c) { c.exec.reserved[1] = 1; }, "exec: reserved fields must be zero"},
      {"ReservedArguments", [](auto& c) { c.reserved[0] = 1; }, "_args: reserved fields must be zero"},
      {"WorkspaceNull", [](auto& c) { c.exec.workspace = nullptr; }, "workspace is null, but workspace_bytes is "},
      {"WorkspaceMisaligned",
       [](auto& c) { c.exec.workspace = static_cast<char*>(c.exec.workspace) + 32, c.exec.workspace_bytes -= 32; },
       "is not 64-byte aligned"},
      {"WorkspaceOverInput", [](auto& c) { c.in.q.data = c.exec.workspace; }, "q and workspace overlap in memory"},
      {"StructOfOlderAbi", [](auto& c) { c.struct_size -= 8; }, "not set, or a struct from an older ABI",
       GD_ABI_MISMATCH},
      {"", [](auto& c) { c.struct_size = 0; }, "_args.struct_size is 0, must be ", GD_ABI_MISMATCH},
      {"StructSizeGarbage", [](auto& c) { c.struct_size = ~size_t{0}; }, "not set", GD_ABI_MISMATCH},
  });
}

RULE(Tuning) {
  CALL;
  gd_tuning tuning = GD_TUNING_INIT;
  c.exec.tuning = &tuning;
  EXPECT_TRUE(c.accepts());
  tuning.reserved_flags = 1;
  EXPECT_TRUE(c.invalid("gd_tuning: reserved fields must be zero"));
  tuning.struct_size = 0;
  EXPECT_TRUE(c.refuses(GD_ABI_MISMATCH, "gd_tuning.struct_size is 0, must be 40"));
}

RULE(IsaOfAnotherArchitecture) {
  CALL;
  const int compiled = info().cpu_isa_compiled;
  for (int isa = 1; isa < GD_ISA_COUNT; ++isa) {
    if (compiled & (1 << isa)) continue;
    c.exec.isa = isa;
    EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, std::string("isa is ") + gd_isa_name(isa) + ", which is not in this build"));
  }
}

RULE(IsaTheMachineHasNot) {
  CALL;
  const gd_info machine = info();
  for (int isa = 1; isa < GD_ISA_COUNT; ++isa) {
    c.exec.isa = isa;
    if (machine.cpu_isa_usable & (1 << isa)) {
      EXPECT_TRUE(c.accepts()) << gd_isa_name(isa);
    } else if (machine.cpu_isa_compiled & (1 << isa)) {
      EXPECT_TRUE(c.refuses(GD_UNSUPPORTED, "which this machine cannot run"));
    }
  }
}

RULE(WorkspaceTooSmall) {
  CALL;
  size_t needed = 0;
  ASSERT_EQ(c.query(&needed), GD_OK);
  ASSERT_GT(needed, 0u);
  c.exec.workspace_bytes = needed - 1;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL,
                        "workspace has " + std::to_string(needed - 1) + " bytes, needs " + std::to_string(needed)));
  c.exec.workspace_bytes = 0;
  c.exec.workspace = nullptr;
  EXPECT_TRUE(c.refuses(GD_WORKSPACE_TOO_SMALL, "workspace has 0 bytes"));
}

RULE(NullArguments) {
  CALL;
  using Args = std::remove_reference_t<decltype(c)>;
  if constexpr (std::is_same_v<Args, ForwardCase>) {
    EXPECT_EQ(gd_forward(nullptr), GD_INVALID_ARGUMENT);
    EXPECT_STREQ(gd_last_error(), "gd_forward_args is null");
  } else if constexpr (std::is_same_v<Args, BackwardCase>) {
    EXPECT_EQ(gd_backward(nullptr), GD_INVALID_ARGUMENT);
    EXPECT_STREQ(gd_last_error(), "gd_backward_args is null");
  } else {
    EXPECT_EQ(gd_recurrent(nullptr), GD_INVALID_ARGUMENT);
    EXPECT_STREQ(gd_last_error(), "gd_recurrent_args is null");
  }
}

RULE(NullAnswer) {
  CALL;
  EXPECT_EQ(c.query(nullptr), GD_INVALID_ARGUMENT);
  EXPECT_STREQ(gd_last_error(), "bytes is null: there is nowhere to put the answer");
}

// What a program built with a later header passes: our struct, then fields we do not know.
template <class Args>
struct Newer {
  Args args;
  uint64_t later[4];
};

template <class Args, class Call>
void check_newer(const Args& args, Call call) {
  Newer<Args> newer = {args, {}};
  newer.args.struct_size = sizeof newer;
  EXPECT_EQ(call(&newer.args), GD_OK) << gd_last_error();
  newer.later[3] = 1;
  EXPECT_EQ(call(&newer.args), GD_ABI_MISMATCH);
  EXPECT_NE(std::string(gd_last_error()).find("a struct from a newer ABI"), std::string::npos) << gd_last_error();
}

TEST(Struct, OfNewerAbi) {
  check_newer<gd_forward_args>(ForwardCase(), [](const gd_forward_args* a) {
    size_t bytes = 0;
    return gd_forward_workspace(a, &bytes);
  });
  check_newer<gd_backward_args>(BackwardCase(), [](const gd_backward_args* a) {
    size_t bytes = 0;
    return gd_backward_workspace(a, &bytes);
  });
  check_newer<gd_recurrent_args>(RecurrentCase(), [](const gd_recurrent_args* a) {
    size_t bytes = 0;
    return gd_recurrent_workspace(a, &bytes);
  });
}

RULE(ThrowingParallelFor) {
  CALL;
  c.exec.parallel_for = [](void*, int64_t, gd_task_fn, void*) { throw std::runtime_error("from outside"); };
  c.exec.num_threads = 2;
  EXPECT_EQ(call(c), GD_INTERNAL);
  EXPECT_STREQ(gd_last_error(), "exception during the call: from outside");
}

TEST(Message, BelongsToItsThread) {
  ForwardCase c;
  c.in.gate = 9;
  EXPECT_NE(call(c), GD_OK);
  std::string elsewhere = "unset";
  std::thread([&] { elsewhere = gd_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_STREQ(gd_last_error(), "gate is 9, must be from 0 to 1");
}

TEST(Names, OfIsasAndStatuses) {
  EXPECT_STREQ(gd_isa_name(GD_ISA_AUTO), "auto");
  EXPECT_STREQ(gd_isa_name(GD_ISA_AMX), "amx");
  EXPECT_STREQ(gd_isa_name(GD_ISA_NEON_BF16), "neon_bf16");
  EXPECT_EQ(gd_isa_name(GD_ISA_COUNT), nullptr);
  EXPECT_EQ(gd_isa_name(-1), nullptr);
  EXPECT_STREQ(gd_status_name(GD_OK), "GD_OK");
  EXPECT_STREQ(gd_status_name(GD_INTERNAL), "GD_INTERNAL");
  EXPECT_STREQ(gd_status_name(static_cast<gd_status>(99)), "not a gd_status");
}

TEST(Info, SaysWhatThereIs) {
  const gd_info machine = info();
  EXPECT_EQ(machine.abi_version, GD_ABI_VERSION);
  EXPECT_EQ(machine.version_major, GD_VERSION_MAJOR);
  EXPECT_EQ(machine.cpu_isa_usable & ~machine.cpu_isa_compiled, 0);
  EXPECT_TRUE(machine.cpu_isa_usable & (1 << GD_ISA_GENERIC));
  EXPECT_TRUE(machine.cpu_isa_usable & (1 << machine.cpu_isa_best));
  EXPECT_GE(machine.cpu_count, 1);
  EXPECT_GE(machine.cuda_devices, 0);
  EXPECT_TRUE(machine.cuda_compiled || machine.cuda_devices == 0);
}

TEST(Info, RefusesOlderStruct) {
  gd_info machine = {};
  machine.cpu_count = -7;
  EXPECT_EQ(gd_get_info(&machine), GD_ABI_MISMATCH);
  EXPECT_EQ(machine.cpu_count, -7);
  EXPECT_NE(std::string(gd_last_error()).find("older ABI"), std::string::npos);
  EXPECT_EQ(gd_get_info(nullptr), GD_INVALID_ARGUMENT);
}

}  // namespace gatedelta::test
