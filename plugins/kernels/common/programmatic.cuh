// Programmatic launch: wait for the preceding grid (a no-op without the launch attribute), let the next one start.
// Below compute capability 9.0 there is no such launch and nothing to wait for.
#pragma once

namespace replayssm {

__device__ __forceinline__ void waitForPredecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void releaseDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace replayssm
