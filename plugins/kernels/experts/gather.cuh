// Tokens of the passes in the order in which a product's steps want them: by pass, block of a step's columns, 8 rows, 16
// bytes of a row's columns, row. What a step needs of a pass is one piece of memory, and 8 rows by 16 bytes are the cores
// of a warpgroup's operand (warpgroup.cuh).
#pragma once

#include "kernels/common/programmatic.cuh"
#include "params.h"

namespace replayssm {

constexpr int kGatherThreads = 256;
constexpr int kGatherBlocks = 8;  // of a multiprocessor

// Eight columns of a row, in the order of columnPlace.
__device__ __forceinline__ uint4 orderedPiece(const uint16_t* row, int place) {
  const auto* in = row + ((place & ~63) | (place >> 4 & 3) << 2 | (place >> 3 & 1) << 1);
  uint4 word;
  word.x = *reinterpret_cast<const uint32_t*>(in);
  word.y = *reinterpret_cast<const uint32_t*>(in + 16);
  word.z = *reinterpret_cast<const uint32_t*>(in + 32);
  word.w = *reinterpret_cast<const uint32_t*>(in + 48);
  return word;
}

__global__ void __launch_bounds__(kGatherThreads) gatherKernel(const __grid_constant__ GatherParams p) {
  waitForPredecessor();
  releaseDependents();  // after the wait: the plan is complete when the first product starts
  const int passes = __ldcg(p.plan.entryCount), steps = p.columns / p.stepColumns, pieces = p.stepColumns / 8;
  const int shift = 31 - __clz(pieces);  // 8 or 16 of them
  for (int task = static_cast<int>(blockIdx.x); task < passes * steps; task += static_cast<int>(gridDim.x)) {
    const int pass = task / steps, step = task - pass * steps;
    const int4 entry = __ldcg(reinterpret_cast<const int4*>(p.plan.entries + pass));
    const int first = entry.y, count = entry.z, rows = (count + kRowGroup - 1) / kRowGroup * kRowGroup;
    uint16_t* out = static_cast<uint16_t*>(p.out) + static_cast<int64_t>(first) * p.columns +
                    static_cast<int64_t>(step) * rows * p.stepColumns;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kGatherThreads) {
      const int row = (i >> (3 + shift)) * kRowGroup + i % kRowGroup, piece = i / kRowGroup & (pieces - 1);
      uint4 word = {0, 0, 0, 0};
      if (row < count) {
        const int token = __ldcg(p.plan.rowToken + first + row);
        word = orderedPiece(static_cast<const uint16_t*>(p.in) + token * p.inStride, step * p.stepColumns + piece * 8);
      }
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(i) * 8) = word;
    }
  }
}

}  // namespace replayssm
