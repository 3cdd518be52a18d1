#define GD_ISA neon_bf16
#define GD_VECTOR_BYTES 16
#define GD_F32_BLOCK_ROWS 8
#include "cpu/engine_neon_bf16.hpp"
#define GD_BF16_ENGINE NeonBf16Engine
#include "cpu/export.hpp"
