// Where a filter cuts a row: the largest key whose tokens, with all better ones, reach a count or a weight.
#pragma once

#include "row.cuh"

namespace replayssm {

constexpr int kCuts = 7;  // keys tried at once: three bits of the answer a pass

// Tokens from a key on: how many, and their weight.
struct Reach {
  int32_t count;
  double weight;
};

struct SearchShared {
  int32_t count[kDrawWarps][kCuts];
  double weight[kDrawWarps][kCuts];
};

// Keys >= key belong to the answer; those above it reach `above`, those from it on `from`.
struct Cut {
  uint32_t key;
  Reach above, from;
};

// Counts and weights of the tokens from each of kCuts rising keys on; every thread gets them.
template <class Weight>
__device__ void reachOf(const LogitRow& row, Weight weight, const uint32_t (&cuts)[kCuts], Reach (&reach)[kCuts],
                        SearchShared& s) {
  int32_t count[kCuts] = {};
  float sum[kCuts] = {};
  row.forEachChunk([&](int32_t, int32_t first, const float(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t key = first + i < row.vocab ? keyOf(x[i]) : 0u;
      const float w = weight(first + i, x[i]);
#pragma unroll
      for (int c = 0; c < kCuts; ++c) {
        const bool in = key >= cuts[c];
        count[c] += in;
        sum[c] += in ? w : 0.0f;
      }
    }
  });
  const int32_t warp = threadIdx.x / 32;
  __syncthreads();  // earlier uses of the shared memory are over
#pragma unroll
  for (int c = 0; c < kCuts; ++c) {
    const int32_t many = warpSum(count[c]);
    const double heavy = warpSum(static_cast<double>(sum[c]));
    if (threadIdx.x % 32 == 0) s.count[warp][c] = many, s.weight[warp][c] = heavy;
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kCuts; ++c) reach[c] = {0, 0.0};
  for (int w = 0; w < kDrawWarps; ++w) {
#pragma unroll
    for (int c = 0; c < kCuts; ++c) {
      reach[c].count += s.count[w][c];
      reach[c].weight += s.weight[w][c];
    }
  }
}

// The largest key from which on the row reaches what `enough(reach)` asks for; all keys do from 0 on, none above `best`.
template <class Weight, class Enough>
__device__ Cut searchCut(const LogitRow& row, Weight weight, Enough enough, uint32_t best, SearchShared& s) {
  uint64_t low = 0, high = static_cast<uint64_t>(best) + 1;
  Cut found{0, {0, 0.0}, {row.vocab, INFINITY}};
  while (high - low > 1) {
    uint32_t cuts[kCuts];
    Reach reach[kCuts];
#pragma unroll
    for (int c = 0; c < kCuts; ++c) cuts[c] = static_cast<uint32_t>(low + (high - low) * (c + 1) / (kCuts + 1));
    reachOf(row, weight, cuts, reach, s);
    const uint64_t highest = high;
#pragma unroll
    for (int c = 0; c < kCuts; ++c) {  // rising: the last that is enough, the first that is not
      if (enough(reach[c])) {
        if (cuts[c] > low) low = cuts[c], found.from = reach[c];
      } else if (high == highest && cuts[c] > low) {
        high = cuts[c], found.above = reach[c];
      }
    }
  }
  found.key = static_cast<uint32_t>(low);
  return found;
}

}  // namespace replayssm
