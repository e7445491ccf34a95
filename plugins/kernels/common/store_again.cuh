// A store of what the next kernel reads: its line leaves the L2 last. Outputs are a few percent of a step's bytes in pieces of
// 128 or 256, and written between long reads they cost several times what their bytes would when the L2 gives them up early.
#pragma once

#include <cstdint>

namespace replayssm {

__device__ __forceinline__ uint64_t againPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void storeAgain(void* at, uint32_t value) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(at), "r"(value), "l"(againPolicy()) : "memory");
}
__device__ __forceinline__ void storeAgain(void* at, uint16_t value) {
  asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(at), "h"(value), "l"(againPolicy()) : "memory");
}

}  // namespace replayssm
