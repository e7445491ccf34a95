// How a warp lies over state rows, for export and import alike: a lane holds 4 neighbouring columns of every 128.
#pragma once

#include "kernels/common/e4m3.cuh"
#include "params.h"

namespace replayssm {

constexpr int kLaneColumns = 4;
constexpr int kChunkColumns = 32 * kLaneColumns;  // one FP8 scale's block

__device__ __forceinline__ float warpSum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Of `lanes` neighbouring lanes.
__device__ __forceinline__ float teamMax(float value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// Index of a head's row among all rows [H, P] of a slot.
__device__ __forceinline__ int64_t rowOf(int head, int headDim, int row) {
  return static_cast<int64_t>(head) * headDim + row;
}

}  // namespace replayssm
