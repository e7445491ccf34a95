// Rows of 128 float32 across a warp, four columns a lane: products, updates, and sums over the lanes.
#pragma once

#include <cuda_runtime.h>

#include "activation.cuh"

namespace replayssm {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum = 0.0f) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// s = decay s + weight k
__device__ __forceinline__ void addScaled(float4& s, float decay, float weight, const float4& k) {
  s.x = fmaf(weight, k.x, decay * s.x);
  s.y = fmaf(weight, k.y, decay * s.y);
  s.z = fmaf(weight, k.z, decay * s.z);
  s.w = fmaf(weight, k.w, decay * s.w);
}

template <class Act>
__device__ __forceinline__ float4 unpack(const uint2& packed) {
  using A = Activation<Act>;
  return make_float4(A::low(packed.x), A::high(packed.x), A::low(packed.y), A::high(packed.y));
}

// Over kLanes neighbouring lanes; all of them receive the sum.
template <int kLanes>
__device__ __forceinline__ float laneSum(float v) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);
  return v;
}

__device__ __forceinline__ float warpSum(float v) { return laneSum<32>(v); }

// Deals kRows sums over the warp out to its lanes by halving: the 32 / kRows lanes l with l / (32 / kRows) = r hold parts
// of the sum of row r.
template <int kRows, int kDistance = 16>
__device__ __forceinline__ float dealRows(const float (&v)[kRows], int lane) {
  if constexpr (kRows == 1) {
    return v[0];
  } else {
    const bool upper = (lane & kDistance) != 0;
    float half[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      float give = upper ? v[i] : v[i + kRows / 2];
      float keep = upper ? v[i + kRows / 2] : v[i];
      half[i] = keep + __shfl_xor_sync(kFullWarp, give, kDistance);
    }
    return dealRows<kRows / 2, kDistance / 2>(half, lane);
  }
}

// Sums kRows values over the warp; lane l receives the sum of row l / (32 / kRows).
template <int kRows>
__device__ __forceinline__ float reduceRows(const float (&v)[kRows], int lane) {
  return laneSum<32 / kRows>(dealRows(v, lane));
}

}  // namespace replayssm
