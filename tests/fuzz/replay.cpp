// Runs the fuzz target on a fixed set of pseudo-random inputs, so that any compiler and any test run covers it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern size_t accepted_calls;
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 3000;
  std::vector<uint8_t> bytes(400);
  for (int call = 0; call < calls; ++call) {
    std::mt19937 random(static_cast<uint32_t>(call));  // its numbers are the same everywhere
    // Mostly small bytes in half of the inputs: there the rare distortions stay out and the call is valid.
    const uint32_t limit = call % 2 ? 256 : 28;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() % limit);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%d calls, %zu accepted\n", calls, accepted_calls);
  return accepted_calls * 10 >= static_cast<size_t>(calls) ? 0 : 1;
}
