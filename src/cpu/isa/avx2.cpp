#define GD_ISA avx2
#define GD_VECTOR_BYTES 32
#define GD_F32_BLOCK_ROWS 4
#include "cpu/engine_f32.hpp"
#define GD_BF16_ENGINE F32Engine
#include "cpu/export.hpp"
