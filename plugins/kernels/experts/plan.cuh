// The plan of a step: (token, choice) pairs sorted by expert, stable, and the passes over experts that have any. The rows of
// an expert begin at a multiple of 8 and end in padding. One block, or a cluster of them for many pairs; each warp counts and
// then places its own run of pairs, so that no order depends on timing.
#pragma once

#include "kernels/common/cluster.cuh"
#include "kernels/common/programmatic.cuh"
#include "order.cuh"
#include "walk.cuh"

namespace replayssm {

constexpr int kPlanWarps = 32;
constexpr int kPlanThreads = kPlanWarps * 32;
constexpr int kPlanBatch = 8;  // pairs a lane loads at once
constexpr int kPlanCluster = 8;  // blocks that share many pairs: one multiprocessor alone stores places too slowly
constexpr int kOrderBlocks = 96;  // at most, that order tokens beside the plan
constexpr int kPlanAlonePairs = 1024;  // up to as many one block is enough

struct PlanSums {
  int32_t rows, passes, cost;
  __device__ PlanSums operator+(const PlanSums& o) const { return {rows + o.rows, passes + o.passes, cost + o.cost}; }
};

// What an expert with `count` pairs adds, but for padding.
__device__ inline PlanSums passSums(int count, int most) {
  if (count == 0) return {0, 0, 0};
  const int each = passTokensOf(count, most);
  const int passes = (count + each - 1) / each;
  return {count, passes, (passes - 1) * passCost(each) + passCost(count - (passes - 1) * each)};
}

// With it: rows of whole groups.
__device__ inline PlanSums sumsOf(int count, int most) {
  PlanSums sums = passSums(count, most);
  sums.rows = (count + kRowGroup - 1) / kRowGroup * kRowGroup;
  return sums;
}

// Exclusive over the block's threads; `total` of all.
__device__ inline PlanSums scanBlock(PlanSums own, PlanSums& total) {
  __shared__ PlanSums warpSums[kPlanWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  PlanSums sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const PlanSums before = {__shfl_up_sync(0xffffffffu, sum.rows, step), __shfl_up_sync(0xffffffffu, sum.passes, step),
                             __shfl_up_sync(0xffffffffu, sum.cost, step)};
    if (lane >= step) sum = sum + before;
  }
  if (lane == 31) warpSums[warp] = sum;
  __syncthreads();
  PlanSums base = {0, 0, 0};
  total = {0, 0, 0};
  for (int i = 0; i < kPlanWarps; ++i) {
    if (i < warp) base = base + warpSums[i];
    total = total + warpSums[i];
  }
  return {base.rows + sum.rows - own.rows, base.passes + sum.passes - own.passes, base.cost + sum.cost - own.cost};
}

__device__ inline void writePasses(const ExpertPlan& plan, int expert, int count, int most, const PlanSums& at) {
  if (count == 0) return;
  const int each = passTokensOf(count, most);
  int cost = at.cost;
  for (int first = 0, i = at.passes; first < count; first += each, ++i) {
    const int tokens = first + each < count ? each : count - first;
    plan.entries[i] = {expert, at.rows + first, tokens, cost};
    cost += passCost(tokens);
  }
}

// Token of a pair, by the inverse of topK: exact, the ABI bounds both.
__device__ __forceinline__ int tokenOf(const PlanParams& p, int pair) {
  return p.topK == 1 ? pair : static_cast<int>(__umulhi(static_cast<uint32_t>(pair), p.topKInverse));
}

// Experts (-1 where there is no work) and routing weights of the pairs first, first + 32, ...: loads that do not wait for
// each other.
struct PlanPairs {
  int expert[kPlanBatch];
  float weight[kPlanBatch];

  __device__ __forceinline__ PlanPairs(const PlanParams& p, int first, int end, bool weighted) {
#pragma unroll
    for (int i = 0; i < kPlanBatch; ++i) {
      const int pair = first + 32 * i;
      expert[i] = -1;
      weight[i] = 0.0f;
      if (pair >= end) continue;
      const int token = tokenOf(p, pair), choice = pair - token * p.topK;
      expert[i] = p.ids[token * p.idStride + choice];
      if (weighted) weight[i] = p.weights[token * p.weightStride + choice];
    }
#pragma unroll
    for (int i = 0; i < kPlanBatch; ++i) {
      if (expert[i] < 0 || expert[i] >= p.experts) expert[i] = -1;
    }
  }
};

// Counts this warp's pairs by expert. All threads of the block call it.
__device__ inline void countPairs(const PlanParams& p, int32_t* counts, int32_t* own, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
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
}

// Grid: one cluster of at most kPlanCluster blocks, behind it clusters that order the tokens meanwhile.
__global__ void __launch_bounds__(kPlanThreads) planKernel(const __grid_constant__ PlanParams p) {
  extern __shared__ int32_t counts[];  // [kPlanWarps][experts]: of each warp's run, then where its pairs go; [experts]
  const int rank = static_cast<int>(clusterRank()), blocks = static_cast<int>(clusterBlocks());
  const int block = static_cast<int>(blockIdx.x) - blocks;
  if (block >= 0) {
    releaseDependents();
    waitForPredecessor();
    orderTokens(p.order, block * kPlanThreads + static_cast<int>(threadIdx.x),
                (static_cast<int>(gridDim.x) - blocks) * kPlanThreads);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pairs = p.tokens * p.topK, threads = kPlanThreads * blocks;
  const int run = (pairs + threads - 1) / threads * 32;  // whole warps' worth
  const int begin = (rank * kPlanWarps + warp) * run, end = begin + run < pairs ? begin + run : pairs;
  int32_t* own = counts + warp * p.experts;
  int32_t* blockCounts = counts + kPlanWarps * p.experts;
  countPairs(p, counts, own, begin, end);
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
#pragma unroll
    for (int r = 0; r < kPlanCluster; ++r) {
      const int count = r < blocks ? clusterWord(blockCounts + firstExpert + i, r) : 0;
      whole[i] += count;
      if (r < rank) before[i] += count;
    }
    sums = sums + sumsOf(whole[i], p.passTokens);
  }
  clusterArrive();  // nobody leaves while others read
  PlanSums at = scanBlock(sums, total);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (!owns(i)) continue;
    const PlanSums adds = sumsOf(whole[i], p.passTokens);
    if ((firstExpert + i) % blocks == rank) {
      writePasses(p.plan, firstExpert + i, whole[i], p.passTokens, at);
      for (int row = whole[i]; row < adds.rows; ++row) p.plan.rowWeight[at.rows + row] = 0.0f;
    }
    int place = at.rows + before[i];
#pragma unroll 8
    for (int w = 0; w < kPlanWarps; ++w) {
      int32_t& count = counts[w * p.experts + firstExpert + i];
      const int next = place + count;
      count = place;
      place = next;
    }
    at = at + adds;
  }
  if (rank == 0 && threadIdx.x == 0) {
    *p.plan.entryCount = total.passes;
    p.plan.tickets[0] = p.plan.tickets[1] = 0;
    p.plan.entries[total.passes] = {-1, total.rows, 0, total.cost};
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
