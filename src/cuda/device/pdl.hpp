// Programmatic dependent launch, as launches and kernel parameters name it.
#pragma once

namespace gatedelta::cuda {

// On: CTAs of a kernel may start while the last ones of the previous kernel still run, and wait before they read. Off
// for the first kernel of a call: the work before it is the caller's.
enum class Pdl : bool { kOff, kOn };
constexpr Pdl pdl_if(bool on) { return on ? Pdl::kOn : Pdl::kOff; }

}  // namespace gatedelta::cuda
