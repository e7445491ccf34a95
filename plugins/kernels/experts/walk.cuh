// Which work a block does and in which order: groups of tiles of the passes over experts, a contiguous run of them a
// block, cut by cost. Found on the device from the plan; nothing here depends on the host knowing the routing.
#pragma once

#include "params.h"

namespace replayssm {

// Cost of a group of tiles of a pass of that many tokens: instructions of a step of two, in tens.
__host__ __device__ inline int passCost(int tokens) {
  const int tiles = (tokens + 7) / 8;
  return tiles <= 4 ? 27 + 2 * tiles : 19 + 4 * tiles;
}

// Tokens of the passes over an expert with `count`: even, in whole tiles of 8.
__host__ __device__ inline int passTokensOf(int count, int most) {
  const int passes = (count + most - 1) / most;
  return ((count + passes - 1) / passes + 7) / 8 * 8;
}

// The passes: from the plan, or cut from the rows of the only matrix.
__device__ inline int passesOf(const GroupedParams& p) {
  if (p.entries != nullptr) return __ldcg(p.entryCount);
  const int each = passTokensOf(p.tokens, p.passTokens);
  return (p.tokens + each - 1) / each;
}

__device__ inline ExpertEntry passAt(const GroupedParams& p, int i) {
  if (p.entries != nullptr) {
    const int4 word = __ldcg(reinterpret_cast<const int4*>(p.entries + i));
    return {word.x, word.y, word.z, word.w};
  }
  const int each = passTokensOf(p.tokens, p.passTokens), first = i * each;
  return {0, first, first + each < p.tokens ? each : p.tokens - first, i * passCost(each)};
}

// A place in the order of work: group of tiles `group` of pass `index`.
struct Place {
  int32_t index, group;
  __device__ bool operator==(const Place& o) const { return index == o.index && group == o.group; }
};

// Where this block begins and ends among the first passes: at whole multiples of kCut groups of a pass. All threads call
// it; `shared` has two places.
template <int kCut>
__device__ inline void findRun(const GroupedParams& p, int passes, Place* shared) {
  const int groups = p.groups;
  const int64_t total = static_cast<int64_t>(passAt(p, passes).cost) * groups;
  int64_t cut[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) cut[i] = total * (blockIdx.x + i) / gridDim.x;
  if (threadIdx.x < 2) shared[threadIdx.x] = {passes, 0};
  __syncthreads();
  for (int entry = static_cast<int>(threadIdx.x); entry < passes; entry += static_cast<int>(blockDim.x)) {
    const int64_t start = static_cast<int64_t>(passAt(p, entry).cost) * groups;
    const int64_t stop = static_cast<int64_t>(passAt(p, entry + 1).cost) * groups;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (cut[i] < start || cut[i] >= stop) continue;
      const int64_t unit = (stop - start) / groups * kCut;
      const int group = static_cast<int>((cut[i] - start + unit - 1) / unit) * kCut;
      const bool behind = kCut == 1 ? group == groups : group >= groups;
      shared[i] = behind ? Place{entry + 1, 0} : Place{entry, group};
    }
  }
  __syncthreads();
}

}  // namespace replayssm
