// Decay weights of one head over a chunk of tokens, as tables in shared memory.
//
// The weight of token j for token t >= j is exp of the log-decays after j up to t, times a factor of token j (dt, or
// 1 / |k|). Tokens are dealt with in blocks of 16. Within a block every weight is the exponential of a sum over exactly
// the tokens between; across blocks it is a product of two exponentials, of sums over the end of j's block with the
// blocks between and over the beginning of t's. No sum is ever subtracted from another, so -infinity is harmless.
#pragma once

#include <cstdint>

namespace replayssm {

constexpr unsigned kWarp = 0xffffffffu;
constexpr int kBlockTokens = 16;
constexpr int kDiagonalPitch = 20;  // floats; neighbouring rows on different banks

// What outputs need.
template <int kChunk>
struct DecayTables {
  static constexpr int kBlocks = kChunk / kBlockTokens;
  float row[kChunk];                       // exp(sum from the beginning of t's block to t)
  float column[kBlocks][kChunk];           // [block of t][j]: factor_j exp(sum after j up to t's block)
  float diagonal[kChunk][kDiagonalPitch];  // [t][j % 16] within a block; zero for j > t
};

// What the state needs.
template <int kChunk>
struct DecayVectors {
  float before[kChunk];  // exp(sum up to t)
  float after[kChunk];   // factor_j exp(sum after j to the end of the chunk)
  float total;           // exp(sum of all)
  float unused[3];
};

// Log-decays and factors of a chunk: token lane + 32 r in element r of every warp that takes part.
template <int kChunk>
struct LogDecays {
  static constexpr int kWords = kChunk / 32;
  float log[kWords], factor[kWords];
};

// Sum within each 16 lanes up to and including this one.
__device__ __forceinline__ float blockPrefix(float value, int lane) {
#pragma unroll
  for (int d = 1; d < kBlockTokens; d *= 2) {
    float other = __shfl_up_sync(kWarp, value, d, kBlockTokens);
    if (lane % kBlockTokens >= d) value += other;
  }
  return value;
}

// Sum within each 16 lanes after this one.
__device__ __forceinline__ float blockSuffix(float value, int lane) {
#pragma unroll
  for (int d = 1; d < kBlockTokens; d *= 2) {
    float other = __shfl_down_sync(kWarp, value, d, kBlockTokens);
    if (lane % kBlockTokens + d < kBlockTokens) value += other;
  }
  float next = __shfl_down_sync(kWarp, value, 1, kBlockTokens);
  return lane % kBlockTokens == kBlockTokens - 1 ? 0.0f : next;
}

// exp of a sum for outputs (2^-21 and the rounding of the argument), or for what enters a state.
template <bool kExact>
__device__ __forceinline__ float weightOf(float sum) {
  return kExact ? expf(sum) : __expf(sum);
}

// One warp writes the entries of the 16 tokens of `block`. kExact: the tables, too, enter a state.
template <bool kExact, int kChunk>
__device__ __forceinline__ void writeDecays(DecayTables<kChunk>& tables, DecayVectors<kChunk>& vectors,
                                            const LogDecays<kChunk>& in, int block, int lane) {
  constexpr int kBlocks = DecayTables<kChunk>::kBlocks, kWords = LogDecays<kChunk>::kWords;
  float prefix[kWords], suffix[kWords], sum[kBlocks];
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    prefix[r] = blockPrefix(in.log[r], lane);
    suffix[r] = blockSuffix(in.log[r], lane);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) sum[b] = __shfl_sync(kWarp, prefix[b / 2], b % 2 * kBlockTokens + kBlockTokens - 1);
  const bool upper = block >= 2;
  const int base = block % 2 * kBlockTokens, own = lane % kBlockTokens, token = block * kBlockTokens + own;
  const float log = upper ? in.log[kWords - 1] : in.log[0];
  const float factor = __shfl_sync(kWarp, upper ? in.factor[kWords - 1] : in.factor[0], base + own);
  const float begin = __shfl_sync(kWarp, upper ? prefix[kWords - 1] : prefix[0], base + own);
  const float end = __shfl_sync(kWarp, upper ? suffix[kWords - 1] : suffix[0], base + own);
  if (lane < kBlockTokens) {
    float earlier = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) earlier += b < block ? sum[b] : 0.0f;
    tables.row[token] = weightOf<kExact>(begin);
    vectors.before[token] = expf(earlier + begin);
  } else {
    float rest = end;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b <= block) continue;
      tables.column[b][token] = factor * weightOf<kExact>(rest);
      rest += sum[b];
    }
    vectors.after[token] = factor * expf(rest);
  }
  if (block == 0 && lane == 0) {
    float all = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) all += sum[b];
    vectors.total = expf(all);
  }
  const int half = lane / kBlockTokens * 8;  // of the tokens t; `own` is j
  float between = 0.0f;
#pragma unroll
  for (int t = 1; t < 8; ++t) {
    float one = __shfl_sync(kWarp, log, base + t);
    if (half != 0 && t > own) between += one;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int t = half + i;
    float one = __shfl_sync(kWarp, log, base + t);
    if (t > own) between += one;
    tables.diagonal[block * kBlockTokens + t][own] = t >= own ? factor * weightOf<kExact>(between) : 0.0f;
  }
}

// The weights of a 16x16 block of scores, rows t of block `to`, columns j of block `from` <= to: scores[half][e] is the
// accumulator of columns 8 half.. . rowFactor[r] multiplies row lane / 4 + 8 r as well.
template <int kChunk>
__device__ __forceinline__ void weighScores(float (&scores)[2][4], const DecayTables<kChunk>& tables, int to, int from,
                                            const float (&rowFactor)[2], int lane) {
  const int g = lane / 4, c = 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = to * kBlockTokens + g + 8 * r;
      float2 w;
      if (from < to) {
        w = *reinterpret_cast<const float2*>(&tables.column[to][from * kBlockTokens + 8 * half + c]);
        const float row = tables.row[t];
        w.x *= row;
        w.y *= row;
      } else {
        w = *reinterpret_cast<const float2*>(&tables.diagonal[t][8 * half + c]);
      }
      scores[half][2 * r] *= w.x * rowFactor[r];
      scores[half][2 * r + 1] *= w.y * rowFactor[r];
    }
  }
}

}  // namespace replayssm
