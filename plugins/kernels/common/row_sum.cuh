// The sum of one number a thread over a block, in an order that depends on the block's size alone.
#pragma once

namespace replayssm {

// Over the block, whose warps' sums are added in order. `shared`: one float a warp.
__device__ __forceinline__ float blockSum(float value, float* shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = shared[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) total += shared[warp];
  return total;
}

}  // namespace replayssm
