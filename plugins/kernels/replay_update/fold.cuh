// The flush of one warp's 16 state rows (paper, Eq. 5): S <- exp(total) S + sum_j (w_j x_j) k_j^T,
// with w_j = dt_j exp(suffix_j) and x_j the input (Mamba-2), w_j = exp(suffix_j) / |k_j| and x_j the correction (GDN).
//
// The sum over records runs on tensor cores with exact operands: k is exact in tf32, the weighted x is split in two
// tf32 parts (2^-23 of its value is lost). Decay and addition are one float32 fused multiply-add per element, so the
// state itself never passes through a narrower format. In place in shared memory, then stored by the bulk engine.
#pragma once

#include "readout.cuh"

namespace replayssm {

// Weighted values of 16 records, in two tf32 parts: rows g, g + 8 of records 2c (k = c) and 2c + 1 (k = c + 4) of each 8.
struct FoldOperand {
  uint32_t high[2][4], low[2][4];

  __device__ void set(int part, const float (&x)[4], const float (&weights)[2]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Split split = splitTf32Rounded(weights[e / 2] * x[e]);
      high[part][e] = split.high;
      low[part][e] = split.low;
    }
  }
};

// The slab's state times `decay` plus 16 records, of which `count` are there (the others' weights are zero). Lane (g, c) has
// rows g and g + 8 and, of each block, columns 4c..4c+3 and 16 + 4c..16 + 4c+3; odd rows take the latter first, which keeps the
// lanes of a phase on distinct banks. A block is read while the one before is still being multiplied.
template <class Traits>
struct FoldedSlab {
  using A = Activation<typename Traits::Act>;
  static constexpr int kRow = Traits::kStateDim;
  const bool odd;
  float* const first;   // the lane's columns that it takes first
  const int otherSide;  // from there to the others

  __device__ FoldedSlab(float* slab, int lane)
      : odd((lane & 4) != 0), first(slab + lane / 4 * kRow + lane % 4 * 4 + (odd ? 16 : 0)), otherSide(odd ? -16 : 16) {}

  // Row half, side taken first or second, of block b.
  __device__ float4* place(int b, int half, int side) const {
    return reinterpret_cast<float4*>(first + half * 8 * kRow + b * kBlock + side * otherSide);
  }

  __device__ void read(float4 (&state)[2][2], int b) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) state[i / 2][i % 2] = *place(b, i / 2, i % 2);
  }

  // update[i] holds columns 4c + i and 16 + 4c + i of rows g and g + 8.
  __device__ void write(const float4 (&state)[2][2], const float (&update)[4][4], float decay, int b) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const bool upper = (side == 0) == odd;
        float4 s = state[half][side];
        s.x = fmaf(decay, s.x, upper ? update[0][2 * half + 1] : update[0][2 * half]);
        s.y = fmaf(decay, s.y, upper ? update[1][2 * half + 1] : update[1][2 * half]);
        s.z = fmaf(decay, s.z, upper ? update[2][2 * half + 1] : update[2][2 * half]);
        s.w = fmaf(decay, s.w, upper ? update[3][2 * half + 1] : update[3][2 * half]);
        *place(b, half, side) = s;
      }
    }
  }
};

template <class Traits>
__device__ __forceinline__ void foldRecords(float* slab, const char* keys, const FoldOperand& operand, float decay,
                                            int count, int lane) {
  using A = Activation<typename Traits::Act>;
  const FoldedSlab<Traits> folded(slab, lane);
  const char* key[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int record = min(8 * (i / 2) + 2 * (lane % 4) + i % 2, count - 1);
    key[i / 2][i % 2] = keys + record * Traits::kKeyPitch + (lane / 4 & 1) * 32 + lane / 8 * 8;
  }
  float4 state[2][2][2];
  folded.read(state[0], 0);
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    if (b + 1 < Traits::kBlocks) folded.read(state[(b + 1) & 1], b + 1);
    float update[4][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint2 k0 = *reinterpret_cast<const uint2*>(key[part][0] + b * 64);
      const uint2 k1 = *reinterpret_cast<const uint2*>(key[part][1] + b * 64);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t w0 = i < 2 ? k0.x : k0.y, w1 = i < 2 ? k1.x : k1.y;
        const uint32_t b0 = __float_as_uint(i & 1 ? A::high(w0) : A::low(w0));
        const uint32_t b1 = __float_as_uint(i & 1 ? A::high(w1) : A::low(w1));
        mmaTf32(update[i], operand.high[part], b0, b1);
        mmaTf32(update[i], operand.low[part], b0, b1);
      }
    }
    folded.write(state[b & 1], update, decay, b);
  }
}

// Any number of records, 16 at a time.
template <class Traits, class Value>
__device__ __forceinline__ void fold(float* slab, const char* keys, const char* values, const Decay& weights,
                                     int pending, int lane) {
  float decay = expf(weights.total);
#pragma unroll 1
  for (int first = 0; first < pending; first += 16) {
    FoldOperand operand;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int tile = first + 8 * part, record = tile + 2 * (lane % 4);
      float x[4];
      valueFragment<Traits, Value>(x, values, record, record + 1, pending, lane);
      const float factors[2] = {weights.committed(tile, record), weights.committed(tile, record + 1)};
      operand.set(part, x, factors);
    }
    foldRecords<Traits>(slab, keys + first * Traits::kKeyPitch, operand, decay, pending - first, lane);
    decay = 1.0f;
  }
}

}  // namespace replayssm
