#define GD_ISA avx512_bf16
#define GD_VECTOR_BYTES 64
#define GD_F32_BLOCK_ROWS 8
#include "cpu/engine_x86_bf16.hpp"
#define GD_BF16_ENGINE Avx512Bf16Engine
#include "cpu/export.hpp"
