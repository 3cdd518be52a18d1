#define GD_ISA amx
#define GD_AMX
#define GD_VECTOR_BYTES 64
#define GD_F32_BLOCK_ROWS 8
#include "cpu/engine_x86_bf16.hpp"
#define GD_BF16_ENGINE AmxEngine
#include "cpu/export.hpp"
