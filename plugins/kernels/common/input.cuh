// Loads of what a predecessor writes, for kernels that have read other things before they wait for it.
#pragma once

#include <cstdint>

namespace replayssm {

// Not __ldg, which promises that nobody writes while the kernel runs: ptxas moves such loads before waitForPredecessor.
template <class T>
__device__ __forceinline__ T loadInput(const T* at) {
  return *at;
}

// The same for an address of which the compiler does not know that it is global.
__device__ __forceinline__ uint2 loadGlobalInput(const uint2* at) {
  uint2 v;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ float loadGlobalInput(const float* at) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint16_t loadGlobalInput(const uint16_t* at) {
  uint16_t v;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
}

}  // namespace replayssm
