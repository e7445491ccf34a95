// The flush of a slab in a warp's registers (paper, Eq. 5): S <- exp(total) S + sum_j dt_j exp(suffix_j) x_j k_j^T, and
// its product with the step's queries. Float32 throughout: keys are exact in tf32, weighted values and the state are
// split in two tf32 parts, decay and sum are one fused multiply-add an element (see replay_update/fold.cuh).
#pragma once

#include "records.cuh"
#include "slab.cuh"

namespace replayssm {

// S <- decay S + values x keys; values: records c, c + 4 of each eight and rows g, g + 8, weighted and split. done(b)
// follows each block's last change.
template <class Traits, class Done>
__device__ __forceinline__ void foldFragments(Slab& s, const char* keys, const uint32_t (&high)[2][4],
                                              const uint32_t (&low)[2][4], float decay, int first, int pending,
                                              int lane, Done done) {
  using A = Activation<typename Traits::Act>;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // columns 2 pair, 2 pair + 1 of every four
      float update[2][4] = {};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t k[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int record = first + 8 * step + lane % 4 + 4 * e;
          k[e] = 0;
          if (record < pending) {
            k[e] = *reinterpret_cast<const uint32_t*>(keys + record * Traits::kKeyPitch + b * 64 + lane / 4 * 8 +
                                                      pair * 4);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t b0 = __float_as_uint(i == 1 ? A::high(k[0]) : A::low(k[0]));
          const uint32_t b1 = __float_as_uint(i == 1 ? A::high(k[1]) : A::low(k[1]));
          mmaTf32(update[i], high[step], b0, b1);
          mmaTf32(update[i], low[step], b0, b1);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& element = s[b][half][2 * pair + i % 2 + i / 2 * 4];
          element = fmaf(decay, element, update[i % 2][2 * half + i / 2]);
        }
      }
    }
    done(b);
  }
}

// Records first..first+15 of `pending`. `values`: the slab's 16 columns of the records' values; weights: Decay, or
// anything that tells a record's weight.
template <class Traits, class Weights, class Done>
__device__ __forceinline__ void foldTile(Slab& s, const char* keys, const char* values, const Weights& weights,
                                         float decay, int first, int pending, int lane, Done done) {
  using A = Activation<typename Traits::Act>;
  uint32_t high[2][4], low[2][4];
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int record = first + 8 * step + lane % 4 + 4 * e;
      const float factor = weights.committed(first, record);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = 0.0f;
        if (record < pending) {
          x = A::toFloat(*reinterpret_cast<const uint16_t*>(values + record * Traits::kSlabValuePitch +
                                                            (lane / 4 + 8 * half) * 2));
        }
        const Split split = splitTf32Rounded(factor * x);
        high[step][2 * e + half] = split.high;
        low[step][2 * e + half] = split.low;
      }
    }
  }
  foldFragments<Traits>(s, keys, high, low, decay, first, pending, lane, done);
}

template <class Traits>
__device__ __forceinline__ void foldSlab(Slab& s, const char* keys, const char* values, const Decay& weights,
                                         int pending, int lane) {
  float decay = expf(weights.total);
#pragma unroll 1
  for (int first = 0; first < pending; first += 16) {
    foldTile<Traits>(s, keys, values, weights, decay, first, pending, lane, [](int) {});
    decay = 1.0f;
  }
}

// S q of rows g and g + 8 for the only token.
template <class Traits>
__device__ __forceinline__ void readSlabOnce(float (&sum)[2], const ParkedSlab& s, const char* query, int lane) {
  using A = Activation<typename Traits::Act>;
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint4 piece = *reinterpret_cast<const uint4*>(query + b * 64 + lane % 4 * 16);
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[8];
      s.get(x, b, half);
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
      if (real[t]) query[t] = *reinterpret_cast<const uint4*>(rows[t] + b * 64 + lane % 4 * 16);
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
