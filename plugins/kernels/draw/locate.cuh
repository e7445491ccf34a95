// Inverse CDF over a row in the order of the ids: sums of chunks first, then the chunk that holds the target.
#pragma once

#include "row.cuh"

namespace replayssm {

struct LocateShared {
  double warp[kDrawWarps];
  double target, before;
  int32_t chunk, last;
  int32_t token;
};

// The first id whose cumulative weight exceeds the target, which targetOf(total) gives; the last id with a weight where
// rounding leaves none. weight(id, logit) >= 0. sums: one float a chunk of shared memory. Every thread gets the id.
template <class Weight, class TargetOf>
__device__ int32_t locate(const LogitRow& row, Weight weight, TargetOf targetOf, float* sums, LocateShared& s) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // earlier uses of the shared memory are over
  row.forEachChunk([&](int32_t chunk, int32_t first, const float(&x)[4]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += weight(first + i, x[i]);
    sum = warpSum(sum);
    if (lane == 0) sums[chunk] = sum;
  });
  if (threadIdx.x == 0) s.chunk = INT32_MAX, s.last = 0;
  __syncthreads();

  // Each thread owns consecutive chunks, so that the scan runs in the order of the ids.
  const int32_t chunks = row.chunks();
  const int32_t each = (chunks + kDrawThreads - 1) / kDrawThreads;
  const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * each, chunks), end = min(begin + each, chunks);
  double own = 0.0;
  int32_t last = -1;
  for (int32_t c = begin; c < end; ++c) {
    own += sums[c];
    if (sums[c] > 0.0f) last = c;
  }
  const double scanned = warpScan(own);
  if (lane == 31) s.warp[warp] = scanned;
  if (last >= 0) atomicMax(&s.last, last);
  __syncthreads();
  double before = scanned - own, total = 0.0;
  for (int w = 0; w < kDrawWarps; ++w) {
    if (w == warp) before += total;
    total += s.warp[w];
  }
  const double target = targetOf(total);
  double upto = before;
  for (int32_t c = begin; c < end; ++c) {
    upto += sums[c];
    if (upto > target) {
      atomicMin(&s.chunk, c);
      break;
    }
  }
  __syncthreads();
  const int32_t chunk = s.chunk == INT32_MAX ? s.last : s.chunk;
  if (chunk >= begin && chunk < end) {
    double offset = before;
    for (int32_t c = begin; c < chunk; ++c) offset += sums[c];
    s.before = offset;
    s.target = target;
  }
  __syncthreads();
  if (warp == 0) {
    const int32_t first = chunk * kDrawChunk + lane * 4;
    float x[4];
    row.load(first, x);
    double w[4], sum = 0.0;
    int32_t heaviest = -1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = weight(first + i, x[i]);
      sum += w[i];
      if (w[i] > 0.0) heaviest = first + i;
    }
    double running = s.before + warpScan(sum) - sum;
    int32_t found = INT32_MAX;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      running += w[i];
      if (found == INT32_MAX && w[i] > 0.0 && running > s.target) found = first + i;
    }
    found = __reduce_min_sync(0xffffffffu, found);
    heaviest = __reduce_max_sync(0xffffffffu, heaviest);
    if (lane == 0) s.token = found == INT32_MAX ? max(heaviest, 0) : found;
  }
  __syncthreads();
  return s.token;
}

}  // namespace replayssm
