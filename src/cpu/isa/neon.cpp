#define GD_ISA neon
#define GD_VECTOR_BYTES 16
#define GD_F32_BLOCK_ROWS 8
#include "cpu/engine_f32.hpp"
#define GD_BF16_ENGINE F32Engine
#include "cpu/export.hpp"
