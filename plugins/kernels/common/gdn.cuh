// Numbers of the gated delta rule that every kernel of it uses.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace replayssm {

constexpr float kNormEps = 1e-6f;         // under the root of a key's or query's L2 norm
constexpr float kLargestHalf = 65504.0f;  // of a correction in float16

// Corrections as the ring holds them: clamped to float16's range, which NaN passes, and rounded to it.
__device__ __forceinline__ __half roundedCorrection(float exact) {
  uint16_t bits;
  asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(bits) : "f"(exact));
  return __ushort_as_half(bits);
}
__device__ __forceinline__ __half2 roundedCorrections(float lower, float upper) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
  return *reinterpret_cast<const __half2*>(&pair);
}

}  // namespace replayssm
