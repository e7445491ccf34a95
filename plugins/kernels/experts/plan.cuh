// The plan of a step: (token, choice) pairs sorted by expert, stable, and the passes over experts that have any. One
// block; each warp counts and then places its own run of pairs, so that no order depends on timing.
#pragma once

#include "walk.cuh"

namespace replayssm {

constexpr int kPlanWarps = 32;
constexpr int kPlanThreads = kPlanWarps * 32;
constexpr int kPlanBatch = 8;  // pairs a lane loads at once

struct PlanSums {
  int32_t pairs, passes, cost;
  __device__ PlanSums operator+(const PlanSums& o) const { return {pairs + o.pairs, passes + o.passes, cost + o.cost}; }
};

// What an expert with `count` pairs adds.
__device__ inline PlanSums sumsOf(int count, int most) {
  if (count == 0) return {0, 0, 0};
  const int each = passTokensOf(count, most);
  const int passes = (count + each - 1) / each;
  return {count, passes, (passes - 1) * passCost(each) + passCost(count - (passes - 1) * each)};
}

// Exclusive over the block's threads; `total` of all.
__device__ inline PlanSums scanBlock(PlanSums own, PlanSums& total) {
  __shared__ PlanSums warpSums[kPlanWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  PlanSums sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const PlanSums before = {__shfl_up_sync(0xffffffffu, sum.pairs, step), __shfl_up_sync(0xffffffffu, sum.passes, step),
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
  return {base.pairs + sum.pairs - own.pairs, base.passes + sum.passes - own.passes, base.cost + sum.cost - own.cost};
}

__device__ inline void writePasses(const ExpertPlan& plan, int expert, int count, int most, const PlanSums& at) {
  if (count == 0) return;
  const int each = passTokensOf(count, most);
  int cost = at.cost;
  for (int first = 0, i = at.passes; first < count; first += each, ++i) {
    const int tokens = first + each < count ? each : count - first;
    plan.entries[i] = {expert, at.pairs + first, tokens, cost};
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

constexpr int kOrderPiece = 8;  // columns a thread writes

// The blocks behind the first: tokens with their columns in the order of a warpgroup's instructions.
__device__ inline void orderTokens(const PlanParams& p, int block) {
  const int64_t piece = static_cast<int64_t>(block) * kPlanThreads + threadIdx.x;
  const int each = p.order.columns / kOrderPiece;
  if (piece >= static_cast<int64_t>(p.tokens) * each) return;
  const int64_t token = piece / each;
  const int place = static_cast<int>(piece - token * each) * kOrderPiece;  // of the 64: instruction and half of it
  const int column = (place & ~63) | (place >> 4 & 3) << 2 | (place >> 3 & 1) << 1;
  const auto* in = static_cast<const uint16_t*>(p.order.in) + token * p.order.inStride + column;
  uint4 word;
  word.x = *reinterpret_cast<const uint32_t*>(in);
  word.y = *reinterpret_cast<const uint32_t*>(in + 16);
  word.z = *reinterpret_cast<const uint32_t*>(in + 32);
  word.w = *reinterpret_cast<const uint32_t*>(in + 48);
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.order.out) + token * p.order.columns + place) = word;
}

__global__ void __launch_bounds__(kPlanThreads) planKernel(const __grid_constant__ PlanParams p) {
  extern __shared__ int32_t counts[];  // [kPlanWarps][experts]: of each warp's run, then where its pairs go
  if (blockIdx.x > 0) {
    releaseDependents();
    waitForPredecessor();
    orderTokens(p, static_cast<int>(blockIdx.x) - 1);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pairs = p.tokens * p.topK;
  const int run = (pairs + kPlanThreads - 1) / kPlanThreads * 32;  // whole warps' worth
  const int begin = warp * run, end = begin + run < pairs ? begin + run : pairs;
  int32_t* own = counts + warp * p.experts;
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
  const int each = (p.experts + kPlanThreads - 1) / kPlanThreads;
  PlanSums sums = {0, 0, 0}, total;
  int32_t expertCounts[kMaxExperts / kPlanThreads];
  const int firstExpert = static_cast<int>(threadIdx.x) * each;
#pragma unroll
  for (int i = 0; i < kMaxExperts / kPlanThreads; ++i) {
    expertCounts[i] = 0;
    if (i >= each || firstExpert + i >= p.experts) continue;
    for (int w = 0; w < kPlanWarps; ++w) expertCounts[i] += counts[w * p.experts + firstExpert + i];
    sums = sums + sumsOf(expertCounts[i], p.passTokens);
  }
  PlanSums at = scanBlock(sums, total);
#pragma unroll
  for (int i = 0; i < kMaxExperts / kPlanThreads; ++i) {
    if (i >= each || firstExpert + i >= p.experts) continue;
    writePasses(p.plan, firstExpert + i, expertCounts[i], p.passTokens, at);
    int place = at.pairs;
    for (int w = 0; w < kPlanWarps; ++w) {
      int32_t& count = counts[w * p.experts + firstExpert + i];
      const int next = place + count;
      count = place;
      place = next;
    }
    at = at + sumsOf(expertCounts[i], p.passTokens);
  }
  if (threadIdx.x == 0) {
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
      const int rank = __popc(same & ((1u << lane) - 1u));
      const int place = expert >= 0 ? own[expert] + rank : -1;
      __syncwarp();
      if (expert >= 0 && rank == 0) own[expert] += __popc(same);
      __syncwarp();
      if (pair < end) p.plan.position[pair] = place;
      if (place >= 0) {
        p.plan.rowToken[place] = tokenOf(p, pair);
        p.plan.rowWeight[place] = batch.weight[i];
      }
    }
  }
}

}  // namespace replayssm
