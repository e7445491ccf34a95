// Routing: a warp a token, expert i of lane l is 32 i + l. Scores are compared as ordered integers.
#include "kernels/common/launch.cuh"
#include "kernels/common/programmatic.cuh"
#include "route.h"

namespace replayssm {
namespace {

constexpr uint32_t kEveryLane = 0xffffffffu;
constexpr uint32_t kTaken = 0;  // below the key of every number

// Keys order as the numbers do; NaN comes last.
__device__ __forceinline__ uint32_t keyOf(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 counts as 0
  if ((bits & 0x7fffffffu) > 0x7f800000u) return kTaken + 1;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float warpMax(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kEveryLane, value, step));
  return value;
}

__device__ __forceinline__ float warpSum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kEveryLane, value, step);
  return value;
}

// Sum of the two highest choices of a group; lane g of the result knows group g's.
template <int kEach>
__device__ __forceinline__ float groupScores(const RouteParams& p, const float (&choice)[kEach], int lane) {
  const int size = p.experts / p.groups;
  float own = 0.0f;
  for (int group = 0; group < p.groups; ++group) {
    float best = -INFINITY, second = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = 32 * i + lane;
      if (expert / size != group || expert >= p.experts) continue;
      second = fmaxf(second, fminf(best, choice[i]));
      best = fmaxf(best, choice[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float otherBest = __shfl_xor_sync(kEveryLane, best, step);
      const float otherSecond = __shfl_xor_sync(kEveryLane, second, step);
      second = fmaxf(fmaxf(second, otherSecond), fminf(best, otherBest));
      best = fmaxf(best, otherBest);
    }
    if (lane == group) own = size > 1 ? best + second : best;
  }
  return own;
}

// Bit g: group g is kept. Ties go to the lower group.
template <int kEach>
__device__ __forceinline__ uint32_t keptGroups(const RouteParams& p, const float (&choice)[kEach], int lane) {
  const float own = groupScores<kEach>(p, choice, lane);
  int better = 0;
  for (int group = 0; group < p.groups; ++group) {
    const float other = __shfl_sync(kEveryLane, own, group);
    better += other > own || (other == own && group < lane);
  }
  return __ballot_sync(kEveryLane, lane < p.groups && better < p.topkGroup);
}

template <int kEach>
__global__ void __launch_bounds__(kRouteWarps * 32) routeKernel(const __grid_constant__ RouteParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x) * kRouteWarps + static_cast<int>(threadIdx.x) / 32;
  releaseDependents();
  waitForPredecessor();
  if (token >= p.rows * p.tokens) return;
  const int row = token / p.tokens, place = token - row * p.tokens;
  int32_t* ids = p.ids + static_cast<int64_t>(token) * p.topK;
  float* weights = p.weights + static_cast<int64_t>(token) * p.topK;
  if (p.slot != nullptr && (p.slot[row] < 0 || place >= p.numTokens[row])) {
    if (lane < p.topK) {
      ids[lane] = -1;
      weights[lane] = 0.0f;
    }
    return;
  }
  const float* logits = p.logits + row * p.rowStride + place * p.tokenStride;
  float score[kEach], choice[kEach];
  float most = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = 32 * i + lane;
    const bool exists = expert < p.experts;
    score[i] = exists ? logits[expert] : -INFINITY;
    most = fmaxf(most, score[i]);
  }
  if (p.sigmoid) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = 32 * i + lane;
      score[i] = 1.0f / (1.0f + expf(-score[i]));
      choice[i] = score[i] + (p.bias != nullptr && expert < p.experts ? p.bias[expert] : 0.0f);
    }
  } else {
    most = warpMax(most);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      choice[i] = score[i];
      score[i] = expf(score[i] - most);
      sum += score[i];
    }
    sum = warpSum(sum);
#pragma unroll
    for (int i = 0; i < kEach; ++i) score[i] /= sum;
  }
  const uint32_t kept = p.groups > 1 ? keptGroups<kEach>(p, choice, lane) : kEveryLane;
  const int size = p.experts / p.groups;
  uint32_t key[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = 32 * i + lane;
    const bool inside = p.groups == 1 || (expert < p.experts && (kept >> (expert / size) & 1u) != 0);
    key[i] = expert < p.experts ? keyOf(inside ? choice[i] : -INFINITY) : kTaken;
  }
  int chosen = 0;  // lane j: the j-th choice
  float weight = 0.0f;
  for (int j = 0; j < p.topK; ++j) {
    uint32_t best = kTaken;
    int where = 0;
    float itsScore = 0.0f;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {  // the last that is not less: the lowest expert of equals
      if (key[i] >= best) {
        best = key[i];
        where = i;
        itsScore = score[i];
      }
    }
    const uint32_t top = __reduce_max_sync(kEveryLane, best);
    const unsigned mine = best == top ? static_cast<unsigned>(32 * where + lane) : UINT32_MAX;
    const int winner = static_cast<int>(__reduce_min_sync(kEveryLane, mine));
    const float winning = __shfl_sync(kEveryLane, itsScore, winner % 32);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (32 * i + lane == winner) key[i] = kTaken;
    }
    if (lane == j) {
      chosen = winner;
      weight = winning;
    }
  }
  if (p.normTopk) weight /= warpSum(weight) + 1e-20f;
  if (lane < p.topK) {
    ids[lane] = chosen;
    weights[lane] = weight * p.scaling;
  }
}

}  // namespace

cudaError_t launchRoute(const RouteParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.rows * p.tokens + kRouteWarps - 1) / kRouteWarps));
  const bool pdl = p.programmaticLaunch;
  if (p.experts <= 256) return launchOn(stream, pdl, routeKernel<8>, grid, kRouteWarps * 32, p);
  if (p.experts <= 512) return launchOn(stream, pdl, routeKernel<16>, grid, kRouteWarps * 32, p);
  return launchOn(stream, pdl, routeKernel<32>, grid, kRouteWarps * 32, p);
}

}  // namespace replayssm
