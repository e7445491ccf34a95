// What norms share: the weights of a thread's eight channels, and sums over a block or over teams of its lanes, in an order
// that depends on the block's or the team's size alone.
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

// Over a team of kLanes lanes; teams wider than a warp are whole blocks and add their warps' sums in order. turn: number of
// the call, where there are several.
template <int kLanes, int kPlaces>
__device__ __forceinline__ void teamSums(float (&sums)[kPlaces], int turn = 0) {
  constexpr int kWidth = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
#pragma unroll
    for (int step = kWidth / 2; step > 0; step /= 2) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step, kWidth);
    }
  }
  if constexpr (kLanes > 32) {
    __shared__ float buffers[2][kPlaces][kLanes / 32];  // one is read while the next one is written
    float(*const shared)[kLanes / 32] = buffers[turn % 2];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (threadIdx.x % 32 == 0) shared[i][threadIdx.x / 32] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      sums[i] = shared[i][0];
#pragma unroll
      for (int warp = 1; warp < kLanes / 32; ++warp) sums[i] += shared[i][warp];
    }
  }
}

}  // namespace replayssm
