// Loads of what a predecessor writes, for kernels that have read other things before they wait for it.
#pragma once

namespace replayssm {

// Not __ldg, which promises that nobody writes while the kernel runs: ptxas moves such loads before waitForPredecessor.
template <class T>
__device__ __forceinline__ T loadInput(const T* at) {
  return *at;
}

}  // namespace replayssm
