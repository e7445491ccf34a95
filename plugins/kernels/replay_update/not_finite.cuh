// Values of this step's tokens that are not finite. A product of matrices multiplies a token's value with the zero weights of
// the tokens before it too, and zero times NaN or infinity is NaN: such values stay out of it and are added one by one.
#pragma once

#include <type_traits>

#include "../common/activation.cuh"
#include "decay.cuh"

namespace replayssm {

__device__ __forceinline__ bool isFinite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

__device__ __forceinline__ bool allFinite(const float (&x)[4]) {
  const bool finite = isFinite(x[0]) && isFinite(x[1]) && isFinite(x[2]) && isFinite(x[3]);
  return __all_sync(kAllLanes, finite);
}

// The same of packed pairs: zero times each is zero, or NaN where a number is not finite.
template <class Act, int kCount>
__device__ __forceinline__ bool allFinite(const uint32_t (&pairs)[kCount]) {
  using Pair = std::conditional_t<std::is_same_v<Act, __half>, __half2, __nv_bfloat162>;
  const uint32_t none = 0;
  Pair sum = *reinterpret_cast<const Pair*>(&none);
#pragma unroll
  for (const uint32_t& pair : pairs) {
    sum = __hfma2(*reinterpret_cast<const Pair*>(&pair), *reinterpret_cast<const Pair*>(&none), sum);
  }
  return __all_sync(kAllLanes, (*reinterpret_cast<const uint32_t*>(&sum) & 0x7fff7fffu) == 0);
}

// sum += x w of those alone of a tile of eight records, for the tokens that they reach. Lane (g, c): x of rows g, g + 8 of record
// 2c, then of record 2c + 1; w[tile][e], the weight of record 2c + e for token 8 tile + g; sum of rows g, g + 8 and tokens 8 tile
// + 2c, 8 tile + 2c + 1. `first`: the tile's first record as a token of this step, negative for committed ones.
template <int kTiles>
__device__ __forceinline__ void addNotFinite(float (&sum)[kTiles][4], const float (&x)[4], const float (&w)[kTiles][2],
                                             int first, int lane) {
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const bool odd = (i & 1) != 0;
    float value[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      value[half] = __shfl_sync(kAllLanes, odd ? x[2 + half] : x[half], (lane & ~3) | i / 2);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float own = odd ? w[tile][1] : w[tile][0];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 2 * (lane % 4) + e;
        const float weight = __shfl_sync(kAllLanes, own, token * 4 + i / 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (first + i > 8 * tile + token || isFinite(value[half])) continue;
          sum[tile][2 * half + e] = fmaf(weight, value[half], sum[tile][2 * half + e]);
        }
      }
    }
  }
}

}  // namespace replayssm
