// What norms over rows by a block share: the weights of a thread's eight channels, and the sum of one number a thread,
// in an order that depends on the block's size alone.
#pragma once

namespace replayssm {

// `at`: the first of the eight; `offset`: what the model adds to its weights.
__device__ __forceinline__ void normWeight(float (&weight)[8], const float* at, float offset) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = reinterpret_cast<const float4*>(at)[i];
    weight[4 * i] = four.x + offset;
    weight[4 * i + 1] = four.y + offset;
    weight[4 * i + 2] = four.z + offset;
    weight[4 * i + 3] = four.w + offset;
  }
}

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
