// Decay weights of one head, held across the lanes of a warp.
//
// Committed records: suffix sums, newest to oldest; this step's tokens: prefix sums from the first of them, and direct
// sums between two of them. No weight is a difference of sums. Only entries that were loaded are read.
#pragma once

#include "traits.cuh"

namespace replayssm {

constexpr unsigned kAllLanes = 0xffffffffu;

// Sum over the lanes after this one (exclusive), reverse order; lanes from `count` on hold zero.
__device__ __forceinline__ float suffixExclusive(float value, int count, int lane) {
  float sum = value;
  for (int d = 1; d < count; d *= 2) {
    float other = __shfl_down_sync(kAllLanes, sum, d);
    if (lane + d < 32) sum += other;
  }
  float next = __shfl_down_sync(kAllLanes, sum, 1);
  return lane < 31 ? next : 0.0f;
}

// Sum over the lanes up to and including this one; meaningful on the first `count` lanes.
__device__ __forceinline__ float prefixInclusive(float value, int count, int lane) {
  float sum = value;
  for (int d = 1; d < count; d *= 2) {
    float other = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += other;
  }
  return sum;
}

struct Decay {
  float weight[2];    // factor exp(suffix sum) of committed records `lane` and `lane + 32`, 0 from h on
  float total;        // log-decay over all committed records, every lane
  float draft;        // log-decay of token `lane`, 0 from num_tokens on
  float draftWeight;  // factor of token `lane`: dt, or 1 / |k|
  float prefix;       // log-decay of tokens 0..lane of this step

  // Mamba-2: log-decay dt a, factor dt; `dt` lists committed records, then tokens.
  __device__ void loadMamba2(const float* dt, float a, int pending, int tokens, int lane) {
    float log[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      int j = lane + 32 * part;
      weight[part] = j < pending ? dt[j] : 0.0f;
      log[part] = weight[part] * a;
    }
    draftWeight = lane < tokens ? dt[pending + lane] : 0.0f;
    draft = draftWeight * a;
    sumUp(log, pending, tokens, lane);
  }

  // GDN: log-decays and key factors of committed records, log-decays of tokens. The caller sets the tokens' factors.
  __device__ void loadGdn(const float* logDecay, const float* factor, int pending, int tokens, int lane) {
    float log[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      int j = lane + 32 * part;
      weight[part] = j < pending ? factor[j] : 0.0f;
      log[part] = j < pending ? logDecay[j] : 0.0f;
    }
    draft = lane < tokens ? logDecay[pending + lane] : 0.0f;
    sumUp(log, pending, tokens, lane);
  }

  // weight holds the records' factors, log their log-decays.
  __device__ void sumUp(const float (&log)[2], int pending, int tokens, int lane) {
    float upper = 0.0f;
    if (pending > 32) {
      float suffix = suffixExclusive(log[1], pending - 32, lane);
      upper = __shfl_sync(kAllLanes, suffix + log[1], 0);
      weight[1] *= expf(suffix);
    }
    float suffix = suffixExclusive(log[0], min(pending, 32), lane) + upper;
    total = __shfl_sync(kAllLanes, suffix + log[0], 0);
    weight[0] *= expf(suffix);
    prefix = prefixInclusive(draft, tokens, lane);
  }

  // Weight of committed record j, whose tile of 8 starts at `first`, a multiple of 8. All lanes call it.
  __device__ float committed(int first, int j) const {
    return __shfl_sync(kAllLanes, first >= 32 ? weight[1] : weight[0], j & 31);
  }

  // sums[e] = log-decay of tokens first + e + 1 .. last, added in order.
  __device__ void between(float (&sums)[2], int first, int last, int tokens) const {
    sums[0] = sums[1] = 0.0f;
    for (int s = 1; s < tokens; ++s) {
      float one = __shfl_sync(kAllLanes, draft, s);
      if (s <= last && s > first) sums[0] += one;
      if (s <= last && s > first + 1) sums[1] += one;
    }
  }
};

}  // namespace replayssm
