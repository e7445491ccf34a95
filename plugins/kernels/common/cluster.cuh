// Blocks of a cluster (sm_90 and later): their place in it and their number, a barrier of all their threads in two halves, and words of each
// other's shared memory. A launch without clusters is one of a block each.
#pragma once

#include <cstdint>

namespace replayssm {

__device__ __forceinline__ uint32_t clusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t clusterBlocks() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

__device__ __forceinline__ void clusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void clusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The word that block `rank` has where `own` is in this block's shared memory. HAZARD: that block must not have left.
__device__ __forceinline__ int32_t clusterWord(const int32_t* own, int rank) {
  int32_t word;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.b32 %0, [there];\n}"
               : "=r"(word)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank)
               : "memory");
  return word;
}

}  // namespace replayssm
