// Arrivals for several at once: a thin name for PTX, beside those of mbarrier.cuh.
#pragma once

#include <cstdint>

namespace replayssm {

__device__ __forceinline__ void barrierArriveTimes(uint32_t barrier, uint32_t times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}

}  // namespace replayssm
