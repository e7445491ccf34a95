// One position's logits as a block reads them: chunks of 128 ids, one a warp and turn, 4 ids a lane.
#pragma once

#include "params.h"

namespace replayssm {

constexpr int kDrawWarps = kDrawThreads / 32;

// Order of floats as order of integers; both zeros are one key.
__device__ __forceinline__ uint32_t keyOf(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float valueOf(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct LogitRow {
  const float* at;
  int32_t vocab;
  bool wide;

  // The lane's 4 logits from id `first` on; -inf behind the vocabulary.
  __device__ __forceinline__ void load(int32_t first, float (&x)[4]) const {
    if (wide && first < vocab) {
      const float4 four = *reinterpret_cast<const float4*>(at + first);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = first + i < vocab ? at[first + i] : -INFINITY;
  }

  __device__ __forceinline__ int32_t chunks() const { return (vocab + kDrawChunk - 1) / kDrawChunk; }

  // f(chunk, first id of the lane, its logits) for the chunks of this warp; several are on their way at once.
  template <class F>
  __device__ __forceinline__ void forEachChunk(F f) const {
    constexpr int kAhead = 4;
    const int32_t lane = threadIdx.x % 32, count = chunks();
    for (int32_t begin = threadIdx.x / 32; begin < count; begin += kDrawWarps * kAhead) {
      float x[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load((begin + i * kDrawWarps) * kDrawChunk + lane * 4, x[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t chunk = begin + i * kDrawWarps;
        if (chunk < count) f(chunk, chunk * kDrawChunk + lane * 4, x[i]);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ T warpSum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Inclusive over the lanes of a warp.
__device__ __forceinline__ double warpScan(double value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

}  // namespace replayssm
