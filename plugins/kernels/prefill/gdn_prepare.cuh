// First kernel of the GDN prompt scan: everything about a chunk that does not need the state, all chunks at once.
//
//   L_tj = beta_t <k_t, k_j> exp(sum_{j<i<=t} g_i), j < t      (keys normalised)
//   (I + L) u = diag(beta) (v - exp(sum_{i<=t} g_i) S k)       (the UT transform; paper, Eq. 10)
//
// One CTA a chunk and key head: raw products of keys and queries once, then for each value head of the group, two at a
// time, the decay tables, L and its inverse: triangles of 32 tokens by forward substitution in float32, a thread a
// column in registers; the square below two of them by matrix instructions on operands of three parts.
#pragma once

#include "../common/gdn.cuh"
#include "gdn_record.cuh"

namespace replayssm {

constexpr int kHeadsAtOnce = 2;

template <class Act_, int kStateDim_>
struct GdnPrepare {
  using Act = Act_;
  static constexpr int kStateDim = kStateDim_;
  static constexpr int kChunk = chunkTokens<Act, kStateDim>();
  static constexpr int kBlocks = kChunk / kBlockTokens;
  static constexpr int kThreads = 32 * kBlocks;  // a warp a block of 16 tokens t; kHeadsAtOnce columns a token
  static constexpr int kKeyPitch = tilePitch(kStateDim);
  static constexpr int kLowerPitch = kChunk + 8;  // floats
  static constexpr int kTileBytes = kChunk * kKeyPitch;
  static constexpr int kLowerBytes = kChunk * kLowerPitch * 4;

  // Shared memory: keys and queries, in whose place the matrices L come; tables, vectors and factors.
  static constexpr int kUnionBytes =
      2 * kTileBytes > kHeadsAtOnce * kLowerBytes ? 2 * kTileBytes : kHeadsAtOnce * kLowerBytes;
  static constexpr int kContextOffset = kUnionBytes;
  static constexpr int kTablesOffset = kContextOffset + kHeadsAtOnce * kContextBytes;
  static constexpr int kVectorsOffset = kTablesOffset + kHeadsAtOnce * sizeof(DecayTables<kChunk>);
  static constexpr int kFactorsOffset = kVectorsOffset + kHeadsAtOnce * sizeof(DecayVectors<kChunk>);
  static constexpr int kSharedBytes = kFactorsOffset + (2 + kHeadsAtOnce) * kChunk * 4;
  static_assert(kThreads == kHeadsAtOnce * kChunk, "a thread a column of L");
};

constexpr int kSolveTokens = 32;  // of the triangles that are inverted by substitution

// x[t] = entry t of column `column` of the inverse of a unit lower triangle of 32 tokens; `lower`: what is below its
// diagonal.
__device__ __forceinline__ void solveColumn(float (&x)[kSolveTokens], const float* lower, int pitch, int column) {
#pragma unroll
  for (int t = 0; t < kSolveTokens; ++t) {
    float sum[4] = {t == column ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < t; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + t * pitch + i);
      sum[0] = fmaf(-l.x, x[i], sum[0]);
      if (i + 1 < t) sum[1] = fmaf(-l.y, x[i + 1], sum[1]);
      if (i + 2 < t) sum[2] = fmaf(-l.z, x[i + 2], sum[2]);
      if (i + 3 < t) sum[3] = fmaf(-l.w, x[i + 3], sum[3]);
    }
    x[t] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}

// sum = A B for 16 rows of A and 32 columns of B, both float32, through three parts. `right`: B's first element.
__device__ __forceinline__ void multiply(float (&sum)[4][4], const uint32_t (&left)[2][3][4], const float* right,
                                         int pitch, int lane) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t b[1][3][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* at = right + (step * 16 + e % 2 * 8 + 2 * (lane % 4)) * pitch + pair * 16 + e / 2 * 8 + lane / 4;
        uint32_t one[3];
        splitPair<3>(one, at[0], at[pitch]);
#pragma unroll
        for (int i = 0; i < 3; ++i) b[0][i][e] = one[i];
      }
      addProducts<3>(&sum[2 * pair], left[step], b);
    }
  }
}

template <class Traits>
struct GdnChunk {
  using Act = typename Traits::Act;
  static constexpr int kChunk = Traits::kChunk, kBlocks = Traits::kBlocks, kPitch = Traits::kKeyPitch;
  using Products = float[kBlocks][2][4];  // 16 tokens t of the warp by 16 tokens j a block

  const PrefillParams& p;
  char* const shared;
  const int index, warp, lane;
  const Chunk c;

  // Of the value head in progress.
  __device__ HeadContext& context(int which) const {
    return *reinterpret_cast<HeadContext*>(shared + Traits::kContextOffset + which * kContextBytes);
  }
  __device__ ChunkInput input(int which, InputName name) const { return {context(which), name, c, p.ringRows}; }
  __device__ GdnRecord<kChunk>& record(int which) const {
    return *recordOf<kChunk>(p, context(which).row, index, context(which).head);
  }
  __device__ float* lower(int which) const { return reinterpret_cast<float*>(shared + which * Traits::kLowerBytes); }
  __device__ DecayTables<kChunk>& tables(int which) const {
    return reinterpret_cast<DecayTables<kChunk>*>(shared + Traits::kTablesOffset)[which];
  }
  __device__ DecayVectors<kChunk>& vectors(int which) const {
    return reinterpret_cast<DecayVectors<kChunk>*>(shared + Traits::kVectorsOffset)[which];
  }
  __device__ float* keyFactor() const { return reinterpret_cast<float*>(shared + Traits::kFactorsOffset); }
  __device__ float* queryFactor() const { return keyFactor() + kChunk; }
  __device__ float* rates(int which) const { return keyFactor() + (2 + which) * kChunk; }

  __device__ void loadKeysAndQueries() const {
    const uint32_t at = sharedAddress(shared);
    loadKeyTile<kChunk, Traits::kStateDim>(at, input(0, kKeys), c.count, threadIdx.x);
    if (c.pending) return;
    loadKeyTile<kChunk, Traits::kStateDim>(at + Traits::kTileBytes, input(0, kQueries), c.count, threadIdx.x);
  }

  // 1 / |x| of the warp's 16 tokens of a tile, two lanes a token.
  __device__ void factors(float* factor, const char* tile, float scale) const {
    const int token = warp * kBlockTokens + lane / 2;
    const char* at = tile + token * kPitch + lane % 2 * Traits::kStateDim;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kStateDim / 16; ++i) {
      const uint4 piece = *reinterpret_cast<const uint4*>(at + i * 16);
      for (uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
        const float low = Activation<Act>::low(pair), high = Activation<Act>::high(pair);
        sum = fmaf(low, low, fmaf(high, high, sum));
      }
    }
    sum += __shfl_xor_sync(kWarp, sum, 1);
    if (lane % 2 == 0) factor[token] = scale / sqrtf(sum + kNormEps);
  }

  __device__ void keyFactors() const {
    const int token = warp * kBlockTokens + lane;
    if (!c.pending) {
      factors(keyFactor(), shared, 1.0f);
      factors(queryFactor(), shared + Traits::kTileBytes, rsqrtf(static_cast<float>(Traits::kStateDim)));
    } else if (lane < kBlockTokens) {
      const ChunkInput factor = input(0, kKeyFactors);
      keyFactor()[token] = token < c.count ? factor.scalar(token) : 0.0f;
      queryFactor()[token] = 0.0f;  // there are none
    }
  }

  // Products of the warp's tokens of `left` with the tokens of the keys up to them.
  __device__ void products(Products& sum, int leftOffset) const {
    const uint32_t at = sharedAddress(shared);
    const uint32_t left = at + leftOffset + warp * 16 * kPitch + rowsFirst(kPitch, lane);
    const uint32_t right = at + columnsFirst(kPitch, lane);
#pragma unroll
    for (int from = 0; from < kBlocks; ++from) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[from][e / 4][e % 4] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < Traits::kStateDim / 16; ++step) {
      uint32_t raw[4], a[Parts<Act>::kCount][4];
      loadTiles(raw, left + step * 32);
      splitActivations<Act>(a, raw);
#pragma unroll
      for (int from = 0; from < kBlocks; ++from) {
        if (from > warp) continue;
        uint32_t b[1][Parts<Act>::kCount][4];
        loadTiles(raw, right + from * 16 * kPitch + step * 32);
        splitActivations<Act>(b[0], raw);
        addProducts<3>(sum[from], a, b);
      }
    }
  }

  __device__ void writeTables(int which) const {
    const ChunkInput g = input(which, kDecays);
    LogDecays<kChunk> d;
#pragma unroll
    for (int word = 0; word < LogDecays<kChunk>::kWords; ++word) {
      const int token = lane + 32 * word;
      d.log[word] = token < c.count ? g.scalar(token) : 0.0f;
      d.factor[word] = keyFactor()[token];
    }
    writeDecays<true>(tables(which), vectors(which), d, warp, lane);
    if (c.pending || lane >= kBlockTokens) return;
    const int token = warp * kBlockTokens + lane;
    rates(which)[token] = token < c.count ? input(which, kRates).scalar(token) : 0.0f;
  }

  __device__ void writeVectors(int which) const {
    GdnRecord<kChunk>& to = record(which);
    const DecayVectors<kChunk>& v = vectors(which);
    const int token = warp * kBlockTokens + lane;
    if (lane < kBlockTokens) {
      to.before[token] = v.before[token] * keyFactor()[token];
      to.query[token] = v.before[token] * queryFactor()[token];
      to.after[token] = v.after[token];
    }
    if (warp == 0 && lane < 4) to.total[lane] = v.total;
  }

  // L of a head into shared memory, its scores into the record.
  __device__ void writeLower(int which, const Products& keys, const Products& queries) const {
    const int g = lane / 4, column = 2 * (lane % 4), first = warp * kBlockTokens + g;
    uint4(*const to)[2][32] = record(which).scores;
    const float scaled[2] = {rates(which)[first] * keyFactor()[first], rates(which)[first + 8] * keyFactor()[first + 8]};
    const float scales[2] = {queryFactor()[first], queryFactor()[first + 8]};
    float* const matrix = lower(which);
#pragma unroll
    for (int from = 0; from < kBlocks; ++from) {
      if (from > warp) continue;
      float l[2][4], score[2][4];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        l[e / 4][e % 4] = keys[from][e / 4][e % 4];
        score[e / 4][e % 4] = queries[from][e / 4][e % 4];
      }
      weighScores<kChunk>(l, tables(which), warp, from, scaled, lane);
      weighScores<kChunk>(score, tables(which), warp, from, scales, lane);
#pragma unroll
      for (int r8 = 0; r8 < 2; ++r8) {
        uint32_t left[2], right[2];
        splitPair<2>(left, score[0][2 * r8], score[0][2 * r8 + 1]);
        splitPair<2>(right, score[1][2 * r8], score[1][2 * r8 + 1]);
        to[pairIndex(warp, from)][r8][lane] = make_uint4(left[0], right[0], left[1], right[1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = first + 8 * r8, j = from * kBlockTokens + 8 * half + column;
          const float2 pair = make_float2(j < t ? l[half][2 * r8] : 0.0f, j + 1 < t ? l[half][2 * r8 + 1] : 0.0f);
          *reinterpret_cast<float2*>(matrix + t * Traits::kLowerPitch + j) = pair;
        }
      }
    }
  }

  // The inverses of the triangles of 32 tokens on L's diagonal, in their place: a thread a column.
  __device__ void invertTriangles() const {
    const int which = threadIdx.x / kChunk, token = threadIdx.x % kChunk, first = token / kSolveTokens * kSolveTokens;
    float* const triangle = lower(which) + first * (Traits::kLowerPitch + 1);
    float x[kSolveTokens];
    solveColumn(x, triangle, Traits::kLowerPitch, token - first);
    __syncwarp();  // a triangle is a warp's own
#pragma unroll
    for (int t = 0; t < kSolveTokens; ++t) triangle[t * Traits::kLowerPitch + token - first] = x[t];
  }

  // Two parts of the entries of (I + L)^-1 diag(beta) for 8 tokens t by 16 tokens j, and the third.
  __device__ static void storeInverse(GdnRecord<kChunk>& to, int pair, int half, int lane, const float (&m)[4],
                                      const float2& firstBeta, const float2& secondBeta) {
    uint32_t left[3], right[3];
    splitPair<3>(left, m[0] * firstBeta.x, m[1] * firstBeta.y);
    splitPair<3>(right, m[2] * secondBeta.x, m[3] * secondBeta.y);
    to.inverse[pair][half][lane] = make_uint4(left[0], right[0], left[1], right[1]);
    to.inverseRest[pair][half][lane] = make_uint2(left[2], right[2]);
  }

  // The blocks within the triangles.
  __device__ void writeTriangles(int which) const {
    GdnRecord<kChunk>& into = record(which);
#pragma unroll 1
    for (int i = warp; i < 2 * GdnRecord<kChunk>::kPairs; i += kBlocks) {
      const int pair = i / 2, half = i % 2;
      const int to = (pair >= 6) + (pair >= 3) + (pair >= 1), from = pair - pairIndex(to, 0);
      if (to / 2 != from / 2) continue;
      const int j = from * kBlockTokens + 2 * (lane % 4);
      const float* at = lower(which) + (to * kBlockTokens + half * 8 + lane / 4) * Traits::kLowerPitch + j;
      const float2 a = *reinterpret_cast<const float2*>(at), b = *reinterpret_cast<const float2*>(at + 8);
      const float* beta = rates(which) + j;
      storeInverse(into, pair, half, lane, {a.x, a.y, b.x, b.y}, *reinterpret_cast<const float2*>(beta),
                   *reinterpret_cast<const float2*>(beta + 8));
    }
  }

  // The square below the triangles A and B: -B L A, 16 rows a warp.
  __device__ void writeSquare(int which) const {
    constexpr int kPitchFloats = Traits::kLowerPitch;
    const float* const matrix = lower(which);
    const float* const rows = matrix + (kSolveTokens + warp % 2 * 16 + lane / 4) * kPitchFloats + 2 * (lane % 4);
    uint32_t left[2][3][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = *reinterpret_cast<const float2*>(rows + kSolveTokens + e % 2 * 8 * kPitchFloats +
                                                             step * 16 + e / 2 * 8);
        uint32_t one[3];
        splitPair<3>(one, pair.x, pair.y);
#pragma unroll
        for (int i = 0; i < 3; ++i) left[step][i][e] = one[i];
      }
    }
    float middle[4][4] = {}, square[4][4] = {};
    multiply(middle, left, matrix + kSolveTokens * kPitchFloats, kPitchFloats, lane);
#pragma unroll
    for (int step = 0; step < 2; ++step) splitOperand<3>(left[step], middle[2 * step], middle[2 * step + 1]);
    multiply(square, left, matrix, kPitchFloats, lane);
    GdnRecord<kChunk>& into = record(which);
    const int to = 2 + warp % 2;
#pragma unroll
    for (int from = 0; from < 2; ++from) {
      const float* beta = rates(which) + from * kBlockTokens + 2 * (lane % 4);
      const float2 first = *reinterpret_cast<const float2*>(beta), second = *reinterpret_cast<const float2*>(beta + 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&l)[4] = square[2 * from];
        const float(&m)[4] = square[2 * from + 1];
        storeInverse(into, pairIndex(to, from), half, lane,
                     {-l[2 * half], -l[2 * half + 1], -m[2 * half], -m[2 * half + 1]}, first, second);
      }
    }
  }

  __device__ void run(const PromptRow& r, int row, int group) const {
    const int first = group * p.headsPerGroup;
    if (threadIdx.x < kHeadsAtOnce) context(threadIdx.x).fill(p, r, row, first + threadIdx.x, 0, true);
    __syncthreads();
    loadKeysAndQueries();
    loadsDrain();
    __syncthreads();
    keyFactors();
    Products keys, queries;
    if (!c.pending) {  // of committed records the ring has the corrections
      products(keys, 0);
      products(queries, Traits::kTileBytes);
    }
#pragma unroll 1
    for (int head = 0; head < p.headsPerGroup; head += kHeadsAtOnce) {
      const int heads = min(kHeadsAtOnce, p.headsPerGroup - head);
      __syncthreads();  // factors are written; the matrices of the last heads and the tiles are read
      if (head > 0 && threadIdx.x < heads) context(threadIdx.x).fill(p, r, row, first + head + threadIdx.x, 0, true);
      __syncthreads();
      for (int which = 0; which < heads; ++which) writeTables(which);
      __syncthreads();
      for (int which = 0; which < heads; ++which) {
        writeVectors(which);
        if (!c.pending) writeLower(which, keys, queries);
      }
      if (c.pending) continue;
      __syncthreads();
      invertTriangles();
      __syncthreads();
      for (int which = 0; which < heads; ++which) writeTriangles(which);
      if constexpr (kChunk > kSolveTokens) {
        if (warp / 2 < heads) writeSquare(warp / 2);
      }
    }
  }
};

// Grid: chunks * groups, rows.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 3) gdnPrepareKernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(128) char shared[];
  const int group = blockIdx.x % p.groups, index = blockIdx.x / p.groups, row = blockIdx.y;
  const PromptRow r = PromptRow::load(p, row);
  if (r.slot < 0 || index >= r.chunks(Traits::kChunk)) return;
  GdnChunk<Traits>{p, shared, index, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32),
                   Chunk::make(r, index, Traits::kChunk)}
      .run(r, row, group);
}

}  // namespace replayssm
