// The flush of a slab in a warp's registers (paper, Eq. 5): S <- exp(total) S + sum_j dt_j exp(suffix_j) x_j k_j^T, and
// its product with the step's queries. Float32 throughout: weighted values are split in three 16-bit parts, keys are
// one, decay and sum are one fused multiply-add an element; for products the state is split in two tf32 parts.
#pragma once

#include "records.cuh"
#include "slab.cuh"

namespace replayssm {

// S <- decay S + values x keys. values: of records c, c + 4, c + 8, c + 12 from `first` on and rows g, g + 8, weighted,
// nothing (zero) from `pending` on.
template <class Traits>
__device__ __forceinline__ void foldFragments(Slab& s, const char* keys, const float (&values)[4][2], float decay,
                                              int first, int pending, int lane) {
  using Act = typename Traits::Act;
  using Parts = WeightParts<Act, 4>;
  Parts parts;
  const float factor = parts.set({values[0][0], values[1][0], values[0][1], values[1][1], values[2][0], values[3][0],
                                  values[2][1], values[3][1]});
#pragma unroll
  for (int b = 0; b < 4; ++b) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // columns 2 pair, 2 pair + 1 of every four
      uint32_t k[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int record = first + lane % 4 + 4 * e;
        k[e] = 0;
        if (record < pending) {
          k[e] = *reinterpret_cast<const uint32_t*>(
              keys + record * Traits::kKeyPitch +
              (Traits::pieceColumn(b, lane / 8) + lane / 4 % 2 * 4 + pair * 2) * 2);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t order = i == 0 ? 0x5410 : 0x7632;
        const uint32_t b0 = __byte_perm(k[0], k[1], order), b1 = __byte_perm(k[2], k[3], order);
        float update[4] = {};
#pragma unroll
        for (int part = 0; part < 3; ++part) mmaAct<Act>(update, parts.part[part], b0, b1);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& element = s[b][e / 2][2 * pair + i + e % 2 * 4];
          element = fmaf(decay, element, Parts::kScaled ? factor * update[e] : update[e]);
        }
      }
    }
  }
}

// Records first..first+15 of `pending`. `values`: the slab's 16 columns of the records' values; weights: Decay, or
// anything that tells a record's weight.
template <class Traits, class Weights>
__device__ __forceinline__ void foldTile(Slab& s, const char* keys, const char* values, const Weights& weights,
                                         float decay, int first, int pending, int lane) {
  using A = Activation<typename Traits::Act>;
  float weighted[4][2];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int record = first + lane % 4 + 4 * e;
    const float factor = weights.committed(first, record);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weighted[e][half] = 0.0f;
      if (record < pending) {
        weighted[e][half] = factor * A::toFloat(*reinterpret_cast<const uint16_t*>(
                                         values + record * Traits::kSlabValuePitch + (lane / 4 + 8 * half) * 2));
      }
    }
  }
  foldFragments<Traits>(s, keys, weighted, decay, first, pending, lane);
}

template <class Traits>
__device__ __forceinline__ void foldSlab(Slab& s, const char* keys, const char* values, const Decay& weights,
                                         int pending, int lane) {
  float decay = expf(weights.total);
#pragma unroll 1
  for (int first = 0; first < pending; first += 16) {
    foldTile<Traits>(s, keys, values, weights, decay, first, pending, lane);
    decay = 1.0f;
  }
}

// S q of rows g and g + 8 for the only token.
template <class Traits>
__device__ __forceinline__ void readSlabOnce(float (&sum)[2], const Slab& s, const char* query, int lane) {
  using A = Activation<typename Traits::Act>;
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint4 piece = *reinterpret_cast<const uint4*>(query + Traits::pieceColumn(b, lane % 4) * 2);
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&x)[8] = s[b][half];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[half] = fmaf(x[2 * i + 1], A::high(words[i]), fmaf(x[2 * i], A::low(words[i]), sum[half]));
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
  }
}

// sum[t] = S v for vectors 2c, 2c + 1 of a tile of eight and rows g, g + 8; rows[t]: the tile's vector g, where there
// is one (`real`). Tiles share the splitting of the state.
template <class Traits, int kTiles>
__device__ __forceinline__ void readSlab(float (&sum)[kTiles][4], const Slab& s, const char* const (&rows)[kTiles],
                                         const bool (&real)[kTiles], int lane) {
  using A = Activation<typename Traits::Act>;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[t][e] = 0.0f;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    uint4 query[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      query[t] = make_uint4(0, 0, 0, 0);
      if (real[t]) query[t] = *reinterpret_cast<const uint4*>(rows[t] + Traits::pieceColumn(b, lane % 4) * 2);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Split split = splitTf32(s[b][e & 1][i + (e & 2) * 2]);
        high[e] = split.high;
        low[e] = split.low;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t words[4] = {query[t].x, query[t].y, query[t].z, query[t].w};
        const uint32_t b0 = __float_as_uint(i & 1 ? A::high(words[i / 2]) : A::low(words[i / 2]));
        const uint32_t b1 = __float_as_uint(i & 1 ? A::high(words[2 + i / 2]) : A::low(words[2 + i / 2]));
        mmaTf32(sum[t], high, b0, b1);
        mmaTf32(sum[t], low, b0, b1);
      }
    }
  }
}

}  // namespace replayssm
