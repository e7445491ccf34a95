// The flush of one warp's 16 state rows (paper, Eq. 5): S <- exp(total) S + sum_j (w_j x_j) k_j^T,
// with w_j = dt_j exp(suffix_j) and x_j the input (Mamba-2), w_j = exp(suffix_j) / |k_j| and x_j the correction (GDN).
//
// The sum over records runs on tensor cores with exact operands: k is exact in tf32, the weighted x is split in two
// tf32 parts (2^-23 of its value is lost). Decay and addition are one float32 fused multiply-add per element, so the
// state itself never passes through a narrower format. In place in shared memory, then stored by the bulk engine.
#pragma once

#include "readout.cuh"

namespace replayssm {

// Adds records first..first+15 of `pending` to the slab, which is first multiplied by `decay`.
template <class Traits, class Value>
__device__ __forceinline__ void foldRecords(float* slab, const char* keys, const char* values, const Decay& weights,
                                            float decay, int first, int pending, int lane) {
  using A = Activation<typename Traits::Act>;
  uint32_t high[2][4], low[2][4];
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int tile = first + 8 * step, record = tile + lane % 4;
    float x[4];
    valueFragment<Traits, Value>(x, values, record, record + 4, pending, lane);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float factor = weights.committed(tile, record + 4 * e);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Split split = splitTf32Rounded(factor * x[2 * e + half]);
        high[step][2 * e + half] = split.high;
        low[step][2 * e + half] = split.low;
      }
    }
  }
  const bool odd = (lane & 4) != 0;
  float* row = slab + (lane / 4) * Traits::kStateDim + (lane % 4) * 8;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    float update[4][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint2 k[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int record = first + 8 * step + lane % 4 + 4 * e;
        k[e] = make_uint2(0, 0);
        if (record < pending) {
          k[e] = *reinterpret_cast<const uint2*>(keys + record * Traits::kKeyPitch + b * 64 + (lane / 4) * 8);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t w0 = i < 2 ? k[0].x : k[0].y;
        uint32_t w1 = i < 2 ? k[1].x : k[1].y;
        uint32_t b0 = __float_as_uint(i & 1 ? A::high(w0) : A::low(w0));
        uint32_t b1 = __float_as_uint(i & 1 ? A::high(w1) : A::low(w1));
        mmaTf32(update[i], high[step], b0, b1);
        mmaTf32(update[i], low[step], b0, b1);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* at = row + half * 8 * Traits::kStateDim + b * kBlock;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const bool upper = (side == 0) == odd;  // odd rows take their upper half first: see loadColumns
        float4* place = reinterpret_cast<float4*>(at + (upper ? 4 : 0));
        float4 s = *place;
        s.x = fmaf(decay, s.x, upper ? update[0][2 * half + 1] : update[0][2 * half]);
        s.y = fmaf(decay, s.y, upper ? update[1][2 * half + 1] : update[1][2 * half]);
        s.z = fmaf(decay, s.z, upper ? update[2][2 * half + 1] : update[2][2 * half]);
        s.w = fmaf(decay, s.w, upper ? update[3][2 * half + 1] : update[3][2 * half]);
        *place = s;
      }
    }
  }
}

template <class Traits, class Value>
__device__ __forceinline__ void fold(float* slab, const char* keys, const char* values, const Decay& weights,
                                     int pending, int lane) {
  float decay = expf(weights.total);
  for (int first = 0; first < pending; first += 16) {
    foldRecords<Traits, Value>(slab, keys, values, weights, decay, first, pending, lane);
    decay = 1.0f;
  }
}

}  // namespace replayssm
