// gd_exec: where and with what a call runs.
#include <cinttypes>

#include "api/validate/checker.hpp"
#include "core/thread_pool.hpp"

namespace gatedelta::api {

gd_status validate_exec(const gd_exec& exec) {
  GD_TRY(check_enum("device", exec.device, GD_CUDA));
  GD_TRY(check_reserved("exec", exec.reserved, exec.reserved_flags));
  if (exec.device == GD_CUDA) {
    if (exec.device_index < 0) return invalid("device_index is %" PRId32 ", must not be negative", exec.device_index);
    if (exec.isa != GD_ISA_AUTO) return invalid("isa must be auto on CUDA: it selects CPU instructions");
    GD_TRY(check_enum("kernels", exec.kernels, GD_KERNELS_PORTABLE));
    if (exec.num_threads != 0 || exec.parallel_for || exec.parallel_for_context)
      return invalid(
          "num_threads, parallel_for and parallel_for_context must not be set on CUDA: they control CPU threads");
    return GD_OK;
  }
  if (exec.device_index != 0) return invalid("device_index is %" PRId32 ", must be 0 on the CPU", exec.device_index);
  if (exec.stream) return invalid("stream must be null on the CPU");
  if (exec.kernels != GD_KERNELS_AUTO) return invalid("kernels must be auto on the CPU: it selects CUDA kernels");
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

gd_status validate_tuning(const gd_exec& exec, gd_tuning& tuning) {
  tuning = {};
  if (!exec.tuning) return GD_OK;
  GD_TRY(check_struct(exec.tuning, "gd_tuning"));
  tuning = *exec.tuning;
  GD_TRY(check_reserved("gd_tuning", tuning.reserved, tuning.reserved_flags));
  const int32_t chunks = tuning.segment_chunks, persistent = tuning.persistent_segment_chunks;
  if (chunks < 0) return invalid("segment_chunks is %" PRId32 ", must not be negative", chunks);
  if (persistent < 0) return invalid("persistent_segment_chunks is %" PRId32 ", must not be negative", persistent);
  if (chunks == 0 && persistent != 0)
    return invalid("persistent_segment_chunks is %" PRId32 ", but segment_chunks is 0", persistent);
  if (chunks == 0 && tuning.segment_halves) return invalid("segment_halves is set, but segment_chunks is 0");
  return GD_OK;
}

}  // namespace gatedelta::api
