// An item of few records, up to 16 committed ones and 8 tokens: their numbers lie side by side in a warp's lanes, and what
// follows from them is straight-line code. Lane l < 16 has the committed record that l newer ones follow, lane 16 + t has
// token t. Lane (g, c) = (l / 4, l % 4) has the values of rows g and g + 8 of records 2c and 2c + 1 of every 8.
#pragma once

#include "../common/transposed.cuh"
#include "fold.cuh"

namespace replayssm {

constexpr int kFewRecords = 16, kFewTokens = 8;

template <class Traits>
struct FewRecords {
  static constexpr int kFirstToken = 16;  // lane of token 0
  const int lane, pending, tokens;
  float step;     // dt of the lane's record or token, 0 where there is none
  float sums[3];  // log-decay of the last 1, 2 and 4 tokens up to the lane's
  float decay;    // exp of the log-decay of all committed records newer than the lane's; of all tokens up to the lane's
  float total;    // exp of the log-decay of all committed records
  uint32_t values[2][4];  // pairs: committed records 0..7, rows g and g + 8, then 8..15; tokens, twice

  // `dt` lists committed records, then tokens; `a` is the head's. No value is read yet.
  __device__ FewRecords(const float* dt, float a, int pendingRecords, int givenTokens, int l)
      : lane(l), pending(pendingRecords), tokens(givenTokens) {
    const int place = lane % 16;
    const bool token = lane >= kFirstToken;
    const int own = token ? pending + place : pending - 1 - place;
    step = place < (token ? tokens : pending) ? dt[own] : 0.0f;
    const float newer = place > 0 && place <= pending && !token ? dt[own + 1] : 0.0f;
    sums[0] = (token ? step : newer) * a;
    sums[1] = withEarlier(sums[0], 1);
    sums[2] = withEarlier(sums[1], 2);
    const float log = withEarlier(withEarlier(sums[2], 4), 8);
    decay = expf(log);
    total = expf(__shfl_sync(kAllLanes, fmaf(step, a, log), max(pending - 1, 0)));  // without records: 0, lane 0's
  }

  // `rows`: the values from the warp's first on. Unused ones repeat another, so that they are finite.
  __device__ void loadValues(const char* rows) {
    loadValues(0, rows, min(lane / 16 * 8 + lane % 8, max(pending - 1, 0)));
    loadValues(1, rows, pending + min(lane % 8, tokens - 1));
  }

  // sum = S q, decayed; lane (g, c) has tokens 2c and 2c + 1.
  __device__ void decayState(float (&sum)[1][4]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float factor = total * __shfl_sync(kAllLanes, decay, kFirstToken + 2 * (lane % 4) + e);
      sum[0][e] *= factor;
      sum[0][2 + e] *= factor;
    }
  }

  // This step's tokens: token i enters token t >= i with its decay in between, dt and <k, q>, and itself with the skip.
  // `dot` as keyDots makes it.
  __device__ void addTokens(float (&sum)[1][4], const float (&dot)[4], float skip) const {
    const int t = lane / 4;
    const float own = __shfl_sync(kAllLanes, sums[0], kFirstToken + t);
    float x[4], w[1][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * (lane % 4) + e, count = t - i, odd = count & 1, pair = count & 2;
      const float two = __shfl_sync(kAllLanes, sums[1], kFirstToken + t - odd);
      const float four = __shfl_sync(kAllLanes, sums[2], kFirstToken + t - odd - pair);
      const float between = (odd != 0 ? own : 0.0f) + (pair != 0 ? two : 0.0f) + ((count & 4) != 0 ? four : 0.0f);
      const float weight = expf(between) * __shfl_sync(kAllLanes, step, kFirstToken + i) * dot[e];
      w[0][e] = i < t ? weight : i == t ? weight + skip : 0.0f;
    }
    const uint32_t pairs[2] = {values[1][0], values[1][1]};
    unpack(x, pairs[0], pairs[1]);
    addTokenValues<Traits>(sum, x, w, 0, allFinite<typename Traits::Act>(pairs), lane);
  }

  // Committed records 8 part..8 part + 7, with the weights of weightsOf; `dot` likewise.
  __device__ void addCommitted(float (&sum)[1][4], const float (&dot)[4], int part, const float (&weights)[2]) const {
    const float own = __shfl_sync(kAllLanes, decay, kFirstToken + lane / 4);
    float x[4];
    unpack(x, values[0][2 * part], values[0][2 * part + 1]);
    const float w[1][2] = {{weights[0] * own * dot[0], weights[1] * own * dot[1]}};
    addValues<Traits>(sum, x, w);
  }

  // dt exp(decay since) of committed records 8 part + 2c and the next one; 0 where there is none.
  __device__ void weightsOf(float (&weights)[2], int part) const {
    const float mine = lane < kFirstToken ? decay * step : 0.0f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      weights[e] = __shfl_sync(kAllLanes, mine, pending - 1 - (8 * part + 2 * (lane % 4) + e) & 31);
    }
  }

  // S <- exp(total) S + all committed records, in place.
  __device__ void fold(float* slab, const char* keys, const float (&weights)[2][2]) const {
    FoldOperand operand;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float x[4];
      unpack(x, values[0][2 * part], values[0][2 * part + 1]);
      operand.set(part, x, weights[part]);
    }
    foldRecords<Traits>(slab, keys, operand, total, pending, lane);
  }

 private:
  // value + that of the lane `distance` before, of the same 16.
  __device__ float withEarlier(float value, int distance) const {
    const float other = __shfl_up_sync(kAllLanes, value, distance);
    return lane % 16 >= distance ? value + other : value;
  }

  // Rows of records for matrices: each lane names one, of the first 8 rows or of the other 8.
  __device__ void loadValues(int which, const char* rows, int record) {
    loadTransposed(values[which], rows + record * Traits::kValuePitch + (lane & 8) * 2);
  }

  // A matrix operand's part, records 2c and 2c + 1 as k = c and c + 4.
  __device__ static void unpack(float (&x)[4], uint32_t lower, uint32_t upper) {
    using A = Activation<typename Traits::Act>;
    x[0] = A::low(lower);
    x[1] = A::low(upper);
    x[2] = A::high(lower);
    x[3] = A::high(upper);
  }
};

}  // namespace replayssm
