// Names that messages use. They are neither C's nor Python's own, so that users of both can read them.
#pragma once

#include <cstdint>

namespace gatedelta {

const char* dtype_name(int64_t dtype);    // "bfloat16"
const char* device_name(int64_t device);  // "cuda"

}  // namespace gatedelta
