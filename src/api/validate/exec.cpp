// gd_exec: where and with what a call runs.
#include <cinttypes>

#include "api/validate/checker.hpp"
#include "core/thread_pool.hpp"

namespace gatedelta::api {

gd_status validate_exec(const gd_exec& exec) {
  GD_TRY(check_enum("device", exec.device, GD_CUDA));
  GD_TRY(check_reserved("exec", exec.reserved));
  if (exec.device == GD_CUDA) {
    if (exec.device_index < 0) return invalid("device_index is %" PRId32 ", must not be negative", exec.device_index);
    if (exec.isa != GD_ISA_AUTO && exec.isa != GD_ISA_CUDA_PORTABLE)
      return invalid("isa is %" PRId32 ", must be 0 (auto) or %d (portable) on CUDA: others select CPU instructions",
                     exec.isa, GD_ISA_CUDA_PORTABLE);
    if (exec.num_threads != 0 || exec.parallel_for || exec.parallel_for_context)
      return invalid(
          "num_threads, parallel_for and parallel_for_context must not be set on CUDA: they control CPU threads");
    return GD_OK;
  }
  if (exec.device_index != 0) return invalid("device_index is %" PRId32 ", must be 0 on the CPU", exec.device_index);
  if (exec.stream) return invalid("stream must be null on the CPU");
  GD_TRY(check_enum("isa", exec.isa, GD_ISA_COUNT - 1));
  if (exec.num_threads < 0 || exec.num_threads > kMaxThreads)
    return invalid("num_threads is %" PRId32 ", must be from 0 to %d", exec.num_threads, kMaxThreads);
  if (exec.parallel_for == gd_thread_pool_parallel_for && !exec.parallel_for_context)
    return invalid("parallel_for is gd_thread_pool_parallel_for, but parallel_for_context is null: pass the pool");
  if (exec.parallel_for) return GD_OK;
  if (exec.num_threads > 1)
    return invalid("num_threads is %" PRId32
                   ", but parallel_for is null: make a gd_thread_pool and pass it with "
                   "gd_thread_pool_parallel_for",
                   exec.num_threads);
  if (exec.parallel_for_context) return invalid("parallel_for_context is given, but parallel_for is null");
  return GD_OK;
}

}  // namespace gatedelta::api
