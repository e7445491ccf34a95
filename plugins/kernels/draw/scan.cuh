// The largest logit of every position, at the speed of memory: blocks read pieces of positions and leave what they found.
//
// Pieces of high ids come first: the product that made the logits wrote those last, and part of them is still in the
// second-level cache.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "row.cuh"

namespace replayssm {

// NaN where either is.
__device__ __forceinline__ float maxOrNan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// The kWord logits from id `first` on; behind the vocabulary the last one again.
template <bool kWide>
__device__ __forceinline__ void loadWord(const float* at, int32_t first, int32_t vocab, float (&x)[kWord]) {
  if constexpr (kWide) {
    const float4 four = *reinterpret_cast<const float4*>(at + first);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < kWord; ++i) x[i] = at[min(first + i, vocab - 1)];
  }
}

// Positions along x, pieces along y. A thread that has passed the end reads the last word again: it changes nothing.
template <bool kWide>
__global__ void __launch_bounds__(kScanThreads) scanKernel(const __grid_constant__ DrawParams p) {
  constexpr uint32_t kEveryLane = 0xffffffffu;
  constexpr int kWarps = kScanThreads / 32;
  __shared__ PieceBest warps[kWarps];
  releaseDependents();
  const int32_t place = static_cast<int32_t>(blockIdx.x) % p.width, line = static_cast<int32_t>(blockIdx.x) / p.width;
  const int32_t piece = static_cast<int32_t>(gridDim.y - 1 - blockIdx.y);
  const float* at = p.logits + line * p.rowStride + place * p.positionStride;
  const int32_t lastWord = (p.vocab - 1) / kWord;
  uint32_t best = 0, bestWord = 0;
  float lowest = INFINITY;
  for (int32_t turn = 0; turn < p.turns; ++turn) {
    const int32_t begin = (piece * p.turns + turn) * (kScanTurn / kWord) + static_cast<int32_t>(threadIdx.x);
    float x[kScanAhead][kWord];
#pragma unroll
    for (int i = 0; i < kScanAhead; ++i) {
      loadWord<kWide>(at, min(begin + i * kScanThreads, lastWord) * kWord, p.vocab, x[i]);
    }
#pragma unroll
    for (int i = 0; i < kScanAhead; ++i) {
      const uint32_t key = keyOf(maxOrNan(maxOrNan(x[i][0], x[i][1]), maxOrNan(x[i][2], x[i][3])));
      if (key > best) {  // words come in rising order: the first of equals stays
        best = key;
        bestWord = static_cast<uint32_t>(min(begin + i * kScanThreads, lastWord));
      }
#pragma unroll
      for (int v = 0; v < kWord; ++v) lowest = fminf(lowest, x[i][v] > -INFINITY ? x[i][v] : INFINITY);
    }
  }
  const uint32_t top = __reduce_max_sync(kEveryLane, best);
  const uint32_t word = __reduce_min_sync(kEveryLane, best == top ? bestWord : UINT32_MAX);
  const float least = valueOf(__reduce_min_sync(kEveryLane, keyOf(lowest)));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = {top, word, least};
  __syncthreads();
  if (threadIdx.x != 0) return;
  PieceBest found = warps[0];
  for (int w = 1; w < kWarps; ++w) {
    const PieceBest other = warps[w];
    if (other.key > found.key || (other.key == found.key && other.word < found.word)) {
      found.key = other.key;
      found.word = other.word;
    }
    found.lowest = fminf(found.lowest, other.lowest);
  }
  p.found[static_cast<int64_t>(blockIdx.x) * p.pieces + piece] = found;
}

}  // namespace replayssm
