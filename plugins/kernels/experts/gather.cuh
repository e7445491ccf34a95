// Tokens of the passes in the order in which a product's steps want them: by pass, block of a step's columns, 8 rows, 16
// bytes of a row's columns, row. What a step needs of a pass is one piece of memory, and 8 rows by 16 bytes are the cores
// of a warpgroup's operand (warpgroup.cuh).
#pragma once

#include "kernels/common/programmatic.cuh"
#include "params.h"

namespace replayssm {

constexpr int kGatherThreads = 256;
constexpr int kGatherBlocks = 4;  // of a multiprocessor

// The copy of a warp: of one pass the columns of one step. A lane takes a row's 8 columns from each 16 of 64: with the
// others of its columns in the order of columnPlace they are four pieces, two columns from each load in every one.
__device__ __forceinline__ void gatherStep(const GatherParams& p, const int4& entry, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32, first = entry.y, count = entry.z;
  const int groups = (count + kRowGroup - 1) / kRowGroup, pieces = p.stepColumns / 8, parts = pieces / 4;
  auto* out = static_cast<uint16_t*>(p.out) + static_cast<int64_t>(first) * p.columns +
              static_cast<int64_t>(step) * groups * kRowGroup * p.stepColumns;
#pragma unroll 2
  for (int unit = lane / kRowGroup; unit < groups * parts; unit += 32 / kRowGroup) {
    const int group = unit / parts, part = unit - group * parts, row = group * kRowGroup + lane % kRowGroup;
    uint4 from[4] = {};
    if (row < count) {
      const int token = __ldcg(p.plan.rowToken + first + row);
      const auto* in = static_cast<const uint16_t*>(p.in) + token * p.inStride + step * p.stepColumns + part / 2 * 64 +
                       part % 2 * 8;
#pragma unroll
      for (int k = 0; k < 4; ++k) from[k] = *reinterpret_cast<const uint4*>(in + 16 * k);
    }
    auto* to = reinterpret_cast<uint4*>(out) + (group * pieces + part * 4) * kRowGroup + lane % kRowGroup;
    to[0] = {from[0].x, from[1].x, from[2].x, from[3].x};
    to[kRowGroup] = {from[0].y, from[1].y, from[2].y, from[3].y};
    to[2 * kRowGroup] = {from[0].z, from[1].z, from[2].z, from[3].z};
    to[3 * kRowGroup] = {from[0].w, from[1].w, from[2].w, from[3].w};
  }
}

__global__ void __launch_bounds__(kGatherThreads, kGatherBlocks) gatherKernel(const __grid_constant__ GatherParams p) {
  waitForPredecessor();
  releaseDependents();  // after the wait: the plan is complete when the first product starts
  const int passes = __ldcg(p.plan.entryCount), steps = p.columns / p.stepColumns;
  const int warps = static_cast<int>(gridDim.x) * kGatherThreads / 32;
  const int own = static_cast<int>(blockIdx.x * kGatherThreads + threadIdx.x) / 32;
  for (int task = own; task < passes * steps; task += warps) {
    const int pass = task / steps;
    gatherStep(p, __ldcg(reinterpret_cast<const int4*>(p.plan.entries + pass)), task - pass * steps);
  }
}

}  // namespace replayssm
