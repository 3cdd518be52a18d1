#define GD_ISA generic
#define GD_VECTOR_BYTES 16
#define GD_F32_BLOCK_ROWS 4
#include "cpu/engine_f32.hpp"
#define GD_BF16_ENGINE F32Engine
#include "cpu/export.hpp"
