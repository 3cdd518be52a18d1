// Runs the fuzz target on a fixed set of pseudo-random inputs, so that any compiler and any test run covers it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern size_t accepted_calls;
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 3000;
  for (int call = 0; call < calls; ++call) {
    uint8_t seed[4];  // the target goes on from here by itself
    std::memcpy(seed, &call, sizeof seed);
    LLVMFuzzerTestOneInput(seed, sizeof seed);
  }
  std::printf("%d calls, %zu accepted\n", calls, accepted_calls);
  return accepted_calls * 4 >= static_cast<size_t>(calls) ? 0 : 1;
}
