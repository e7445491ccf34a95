// The plan of a step by a cluster of blocks: (token, choice) pairs sorted by expert, stable, and the passes over experts
// that have any. Each warp of the cluster counts and then places its own run of pairs, so that no order depends on timing.
// The rows of an expert begin at a multiple of 8 and end in padding.
#pragma once

#include "plan.cuh"

namespace replayssm {

constexpr int kPlanCluster = 8;         // blocks that share the pairs of a large step
constexpr int kPlanAlonePairs = 1024;   // up to as many one block is faster than the barriers of a cluster

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

// A word of another block's shared memory.
__device__ __forceinline__ int32_t clusterWord(uint32_t address, uint32_t rank) {
  int32_t word;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.b32 %0, [there];\n}"
      : "=r"(word)
      : "r"(address), "r"(rank));
  return word;
}

// What an expert with `count` pairs adds: rows of whole groups.
__device__ inline PlanSums paddedSums(int count, int most) {
  PlanSums sums = sumsOf(count, most);
  sums.pairs = (count + kRowGroup - 1) / kRowGroup * kRowGroup;
  return sums;
}

// Grid: the blocks of the plan, then those that order tokens.
__global__ void __launch_bounds__(kPlanThreads) clusterPlanKernel(const __grid_constant__ PlanParams p) {
  extern __shared__ int32_t counts[];  // [kPlanWarps][experts]: of each warp's run, then where its pairs go; [experts]
  if (blockIdx.x >= static_cast<unsigned>(p.planBlocks)) {
    releaseDependents();
    waitForPredecessor();
    orderTokens(p, static_cast<int>(blockIdx.x) - p.planBlocks);
    return;
  }
  const int rank = static_cast<int>(clusterRank()), blocks = static_cast<int>(clusterBlocks());
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pairs = p.tokens * p.topK, threads = kPlanThreads * blocks;
  const int run = (pairs + threads - 1) / threads * 32;  // whole warps' worth
  const int begin = (rank * kPlanWarps + warp) * run, end = begin + run < pairs ? begin + run : pairs;
  int32_t* own = counts + warp * p.experts;
  int32_t* blockCounts = counts + kPlanWarps * p.experts;
  for (int i = static_cast<int>(threadIdx.x); i < kPlanWarps * p.experts; i += kPlanThreads) counts[i] = 0;
  releaseDependents();
  waitForPredecessor();
  __syncthreads();
  for (int base = begin; base < end; base += 32 * kPlanBatch) {
    const PlanPairs batch(p, base + lane, end, false);
#pragma unroll
    for (int expert : batch.expert) {
      if (expert >= 0) atomicAdd(own + expert, 1);
    }
  }
  __syncthreads();
  // A thread's experts: their counts in this block, in the blocks before and in all.
  constexpr int kOwn = kMaxExperts / kPlanThreads;
  const int each = (p.experts + kPlanThreads - 1) / kPlanThreads;
  const int firstExpert = static_cast<int>(threadIdx.x) * each;
  const auto owns = [&](int i) { return i < each && firstExpert + i < p.experts; };
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (!owns(i)) continue;
    int count = 0;
#pragma unroll 8
    for (int w = 0; w < kPlanWarps; ++w) count += counts[w * p.experts + firstExpert + i];
    blockCounts[firstExpert + i] = count;
  }
  clusterArrive();
  clusterWait();
  PlanSums sums = {0, 0, 0}, total;
  int32_t whole[kOwn], before[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    whole[i] = before[i] = 0;
    if (!owns(i)) continue;
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(blockCounts + firstExpert + i));
#pragma unroll
    for (int r = 0; r < kPlanCluster; ++r) {
      const int count = r < blocks ? clusterWord(address, r) : 0;
      whole[i] += count;
      if (r < rank) before[i] += count;
    }
    sums = sums + paddedSums(whole[i], p.passTokens);
  }
  clusterArrive();  // nobody leaves while others read
  PlanSums at = scanBlock(sums, total);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (!owns(i)) continue;
    if ((firstExpert + i) % blocks == rank) writePasses(p.plan, firstExpert + i, whole[i], p.passTokens, at);
    int place = at.pairs + before[i];
#pragma unroll 8
    for (int w = 0; w < kPlanWarps; ++w) {
      int32_t& count = counts[w * p.experts + firstExpert + i];
      const int next = place + count;
      count = place;
      place = next;
    }
    at = at + paddedSums(whole[i], p.passTokens);
  }
  if (rank == 0 && threadIdx.x == 0) {
    *p.plan.entryCount = total.passes;
    p.plan.entries[total.passes] = {-1, total.pairs, 0, total.cost};
  }
  __syncthreads();
  for (int base = begin; base < end; base += 32 * kPlanBatch) {
    const PlanPairs batch(p, base + lane, end, true);
#pragma unroll
    for (int i = 0; i < kPlanBatch; ++i) {
      if (base + 32 * i >= end) break;
      const int pair = base + lane + 32 * i, expert = batch.expert[i];
      const uint32_t same = __match_any_sync(0xffffffffu, expert);
      const int position = __popc(same & ((1u << lane) - 1u));
      const int place = expert >= 0 ? own[expert] + position : -1;
      __syncwarp();
      if (expert >= 0 && position == 0) own[expert] += __popc(same);
      __syncwarp();
      if (pair < end) p.plan.position[pair] = place;
      if (place >= 0) {
        p.plan.rowToken[place] = tokenOf(p, pair);
        p.plan.rowWeight[place] = batch.weight[i];
      }
    }
  }
  clusterWait();
}

}  // namespace replayssm
