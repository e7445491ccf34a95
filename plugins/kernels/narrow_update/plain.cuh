// Plain decoding in windows of up to 16 records: the weights of all of a warp's heads at once, eight lanes a head, two
// records a lane. A step that does not flush then has one tile of records, its token the last of them.
#pragma once

#include "part.cuh"

namespace replayssm {

// Of the part's head `index`: 16 weights, then factors.
template <class Traits>
__device__ __forceinline__ float* plainWeights(const Part<Traits>& part, int index) {
  return reinterpret_cast<float*>(part.shared + part.layout.weightOffset +
                                  index % Traits::kWarps * Traits::kWeightBytes) +
         index / Traits::kWarps * Traits::kWeightPitch;
}

// Step sizes and log-decays of one head over eight lanes: records 2r, 2r + 1 of lane r, zero from the newest one on.
struct PlainScan {
  int r;
  float weight[2];  // of the records up to the newest one
  float total;      // log-decay over all records
  float tokenStep, tokenLog;

  __device__ PlainScan(const float (&step)[2], float token, float a, int lane) {
    r = lane % 8;
    tokenStep = token;
    tokenLog = tokenStep * a;
    float suffix = fmaf(step[0], a, step[1] * a);
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      const float other = __shfl_down_sync(kAllLanes, suffix, d, 8);
      if (r + d < 8) suffix += other;
    }
    total = __shfl_sync(kAllLanes, suffix, 0, 8);
    const float next = __shfl_down_sync(kAllLanes, suffix, 1, 8);
    const float after = r < 7 ? next : 0.0f;
    weight[0] = step[0] * expf(fmaf(step[1], a, after));
    weight[1] = step[1] * expf(after);
  }
};

// For a step that does not flush: weights of the lane's records and the token.
template <class Traits>
__device__ __forceinline__ void plainWeightsOf(float (&weight)[2], const PlainScan& scan, const Part<Traits>& part,
                                               float skip) {
  const int r = scan.r;
  const float decay = expf(scan.tokenLog);
  // Lane c of the first token's has the products of records 2c, 2c + 1, 2c + 8, 2c + 9.
  const float2 dot = reinterpret_cast<const float2*>(part.dots() + r % 4)[r / 4];
  weight[0] = scan.weight[0] * decay * dot.x;
  weight[1] = scan.weight[1] * decay * dot.y;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (2 * r + e == part.pending) weight[e] = fmaf(scan.tokenStep, e == 0 ? dot.x : dot.y, skip);
    if (2 * r + e > part.pending) weight[e] = 0.0f;
  }
}

// For a flush: weights of the records, at 16 their decay, at 17 the token's, at 18 the token's weight, at 19 what the
// product of codes and query is multiplied by. For all warps.
template <class Traits>
__device__ __forceinline__ void setPlainFolds(const Part<Traits>& part) {
  static_assert(Traits::kMaxRounds <= 4, "eight lanes a head");
  const int r = part.lane % 8, own = part.warp + part.lane / 8 * Traits::kWarps;
  const int index = own < part.heads ? own : 0;  // lanes without a head compute the first one's and store nothing
  const float* dt = part.dt(index);
  const float* scalars = part.scalars() + index;
  float step[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) step[e] = 2 * r + e < part.pending ? dt[2 * r + e] : 0.0f;
  const PlainScan scan(step, dt[part.pending], scalars[0], part.lane);
  if (own >= part.heads) return;
  float* at = plainWeights(part, own);
  *reinterpret_cast<float2*>(at + 2 * r) = make_float2(scan.weight[0], scan.weight[1]);
  if (r == 0) {
    const float decay = expf(scan.total), tokenDecay = expf(scan.tokenLog);
    at[16] = decay;
    at[17] = tokenDecay;
    if constexpr (Traits::kReadsCodes) at[19] = decay * tokenDecay * *part.fragmentFactors();
    at[18] = fmaf(scan.tokenStep, *part.dotOf(part.pending), part.p.skip != nullptr ? scalars[kMaxPartHeads] : 0.0f);
  }
}

struct PlainFolds {
  const float* at;
  __device__ float committed(int, int record) const { return at[record]; }
};

// sum <- decayed sum + records for the only token, in column 0, or (kBlockColumns) in shares, a column each.
template <class Traits>
__device__ __forceinline__ void addPlainRecords(float (&sum)[Traits::kItemSlabs][4], const Part<Traits>& part,
                                                int index, uint32_t values) {
  const float* at = plainWeights(part, index);
  const float factor = at[16];
  float weight[4] = {};
  if (part.lane < 4) {
    const float2 low = *reinterpret_cast<const float2*>(at + 2 * part.lane);
    const float2 high = *reinterpret_cast<const float2*>(at + 2 * part.lane + 8);
    weight[0] = low.x;
    weight[1] = low.y;
    weight[2] = high.x;
    weight[3] = high.y;
  }
#pragma unroll
  for (int m = 0; m < Traits::kSlabs; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[m][e] *= factor;
  }
  using Act = typename Traits::Act;
  addRecords<Act, Traits::kSlabs, Traits::kValuePitch>(sum, values, weight, part.pending + 1, part.lane);
}

}  // namespace replayssm
