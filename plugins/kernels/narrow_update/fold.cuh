// The flush of a slab in a warp's registers (paper, Eq. 5): S <- exp(total) S + sum_j dt_j exp(suffix_j) x_j k_j^T, and
// its product with the step's queries. Float32 throughout: weighted values are split in three 16-bit parts, keys are
// one, decay and sum are one fused multiply-add an element; for products the state is split in two tf32 parts.
#pragma once

#include "part.cuh"
#include "records.cuh"
#include "slab.cuh"

namespace replayssm {

// Columns of a tile of eight, a product's right operand, in the order of its lanes: tile 4 b + 2 pair + i has columns
// 2 pair + i of every four of piece b. Rows of keys have their tiles one after the other (tileKeys), exchanged by this.
__device__ __forceinline__ int tileSwap(int record) { return record / 2 % 4; }

// Brings the committed keys of all groups of the part into the order of tiles, in place. By all warps, a row a half.
template <class Traits>
__device__ __forceinline__ void tileKeys(const Part<Traits>& part) {
  const int tile = part.lane % 16;
#pragma unroll 1
  for (int index = 0; index < part.groups; ++index) {
#pragma unroll 1
    for (int first = 2 * part.warp; first < part.pending; first += 2 * Traits::kWarps) {
      const int record = min(first + part.lane / 16, part.pending - 1);
      char* row = part.shared + index * part.layout.groupBytes + part.layout.keyOffset + record * Traits::kKeyPitch;
      uint16_t key[8];
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        const int column = Traits::pieceColumn(tile / 4, g / 2) + g % 2 * 4 + tile % 4;
        key[g] = *reinterpret_cast<const uint16_t*>(row + column * 2);
      }
      __syncwarp();
      const auto both = [&](int g) { return static_cast<uint32_t>(key[g]) | static_cast<uint32_t>(key[g + 1]) << 16; };
      *reinterpret_cast<uint4*>(row + (tile ^ tileSwap(record)) * 16) = make_uint4(both(0), both(2), both(4), both(6));
      __syncwarp();
    }
  }
}

// Right operands of a fold, records c, c + 4, c + 8, c + 12 from `first` on, of columns 2 pair, 2 pair + 1 of every four
// of a piece. A record that is not there is another one, or, from keys as they came, zero.
template <class Traits, bool kTiled = Traits::kTiledKeys>
struct FoldKeys {
  uint32_t address[2];  // of this lane's row of the first four tiles, of the first and the second pair

  __device__ __forceinline__ FoldKeys(const char* keys, int first, int pending, int lane) {
    const int record = min(first + lane % 8 / 2 + lane % 2 * 4 + lane / 8 % 2 * 8, pending - 1);
    const int tile = lane / 16 ^ tileSwap(record);
    const uint32_t row = sharedAddress(keys) + record * Traits::kKeyPitch;
    address[0] = row + tile * 16;
    address[1] = row + (tile ^ 2) * 16;
  }
  __device__ __forceinline__ void load(uint32_t (&k)[2][2], int b, int pair) const {
    uint32_t d[4];
    loadTransposed(d, address[pair] + 64 * b);
    k[0][0] = d[0];
    k[0][1] = d[1];
    k[1][0] = d[2];
    k[1][1] = d[3];
  }
};

template <class Traits>
struct FoldKeys<Traits, false> {
  const char* keys;
  int first, pending, lane;

  __device__ __forceinline__ void load(uint32_t (&k)[2][2], int b, int pair) const {
    uint32_t both[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int record = first + lane % 4 + 4 * e;
      if (record < pending) {
        both[e] = *reinterpret_cast<const uint32_t*>(
            keys + record * Traits::kKeyPitch +
            (Traits::pieceColumn(b, lane / 8) + lane / 4 % 2 * 4 + pair * 2) * 2);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      k[i / 2][i % 2] = __byte_perm(both[i % 2 * 2], both[i % 2 * 2 + 1], i / 2 == 0 ? 0x5410 : 0x7632);
    }
  }
};

// S <- decay S + values x keys. values: of records c, c + 4, c + 8, c + 12 from `first` on and rows g, g + 8, weighted,
// nothing (zero) from `pending` on.
template <class Traits>
__device__ __forceinline__ void foldFragments(Slab& s, const char* keys, const float (&values)[4][2], float decay,
                                              int first, int pending, int lane) {
  using Act = typename Traits::Act;
  using Parts = WeightParts<Act, 4>;
  const FoldKeys<Traits> right{keys, first, pending, lane};
  Parts parts;
  const float factor = parts.set({values[0][0], values[1][0], values[0][1], values[1][1], values[2][0], values[3][0],
                                  values[2][1], values[3][1]});
#pragma unroll
  for (int b = 0; b < 4; ++b) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // columns 2 pair, 2 pair + 1 of every four
      uint32_t k[2][2];
      right.load(k, b, pair);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float update[4] = {};
#pragma unroll
        for (int part = 0; part < 3; ++part) mmaAct<Act>(update, parts.part[part], k[i][0], k[i][1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& element = s[b][e / 2][2 * pair + i + e % 2 * 4];
          element = fmaf(decay, element, Parts::kScaled ? factor * update[e] : update[e]);
        }
      }
    }
  }
}

// The weighted values of records c, c + 4, c + 8, c + 12 from `first` on, rows g and g + 8. `values`: the slab's 16
// columns of the records' values; weights: Decay, or anything that tells a record's weight.
template <class Traits, class Weights>
__device__ __forceinline__ void weighValues(float (&weighted)[4][2], const char* values, const Weights& weights,
                                            int first, int pending, int lane) {
  using A = Activation<typename Traits::Act>;
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
}

template <class Traits>
__device__ __forceinline__ void foldSlab(Slab& s, const char* keys, const char* values, const Decay& weights,
                                         int pending, int lane) {
  float decay = expf(weights.total);
#pragma unroll 1
  for (int first = 0; first < pending; first += 16) {
    float weighted[4][2];
    weighValues<Traits>(weighted, values, weights, first, pending, lane);
    foldFragments<Traits>(s, keys, weighted, decay, first, pending, lane);
    decay = 1.0f;
  }
}

// Sums over the four lanes of a row.
__device__ __forceinline__ void addLanes(float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
    sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
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
  addLanes(sum);
}

// A row of 128 keys or queries, four of them a lane's, becomes float16 scaled to its top binade; returns what they are
// multiplied by.
template <class Act>
__device__ __forceinline__ float makeHalves(uint2& words) {
  using A = Activation<Act>;
  const float x[4] = {A::low(words.x), A::high(words.x), A::low(words.y), A::high(words.y)};
  const float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  const uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(largest));
  const int exponent = max(static_cast<int>(bits >> 23) - 127, -100);
  const float up = __uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23);
  const __half2 low = __floats2half2_rn(x[0] * up, x[1] * up), high = __floats2half2_rn(x[2] * up, x[3] * up);
  words = make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
  return __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23);
}

// A vector of the only token for CodeProduct, by a warp: of eight halves, words 0, 2, 1, 3. row: of keys or queries.
template <class Traits>
__device__ __forceinline__ void storeVector(char* to, float* factor, const char* row, int lane) {
  uint2 words = *reinterpret_cast<const uint2*>(row + lane * 8);
  const float down = makeHalves<typename Traits::Act>(words);
  uint32_t* at = reinterpret_cast<uint32_t*>(to) + lane / 2 * 4 + lane % 2;
  at[0] = words.x;
  at[2] = words.y;
  if (lane == 0) *factor = down;
}

// C v of rows g and g + 8 for the only token's query, or its key (lanes with even c) and query, from a slab's codes, which
// are exact in float16 and lack the rows' scales. A lane's words of a row are a left operand as they come: words 0 and 2 as
// one row's, 1 and 3 as another's, of which even and odd columns have the vector's.
template <class Traits>
struct CodeProduct {
  float sum[2][4] = {};
  const char* vector;  // this column's

  __device__ __forceinline__ CodeProduct(const char* vectors, int lane)
      : vector(vectors + lane % 4 * 32 + lane / 4 % 2 * 8 +
               (Traits::kVectorsPerToken == 2 ? lane / 8 % 2 * 2 * Traits::kStateDim : 0)) {}

  // x: piece b of rows g and g + 8.
  __device__ __forceinline__ void add(const uint4 (&x)[2], int b) {
    const uint2 v = *reinterpret_cast<const uint2*>(vector + Traits::pieceColumn(b, 0) * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mmaAct<__half>(sum[half], {x[half].x, x[half].y, x[half].z, x[half].w}, v.x, v.y);
    }
  }
  __device__ __forceinline__ float row(int half) const { return sum[half][0] + sum[half][3]; }
};

// What records c, c + 4, c + 8, c + 12 add to rows g and g + 8; dots: where the first one's product is, in the order of
// Part::dotOf.
__device__ __forceinline__ void addWeighted(float (&sum)[2], const float (&weighted)[4][2], const float* dots) {
  const float dot[4] = {dots[0], dots[8], dots[2], dots[10]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = weighted[0][half] * dot[0];
#pragma unroll
    for (int e = 1; e < 4; ++e) sum[half] = fmaf(weighted[e][half], dot[e], sum[half]);
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
