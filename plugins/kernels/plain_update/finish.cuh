// What follows the products of a plain step: weights, output, append, and the flush (paper, Eq. 6; GDN Eq. 9-11).
#pragma once

#include "../common/gdn.cuh"
#include "step.cuh"

namespace replayssm::plain {

// The step's own inputs besides its vectors.
struct TokenScalars {
  float number;  // dt or log-decay
  float rate;    // A or beta
  float skip;    // Mamba-2
  uint16_t value;  // of the lane's row

  // What no predecessor makes.
  template <class Traits>
  static __device__ TokenScalars constants(const Step<Traits>& step) {
    const UpdateParams& p = step.p;
    TokenScalars in{};
    if (Traits::kGdn) return in;
    in.rate = __ldg(p.a + step.head);
    if (p.skip != nullptr) in.skip = __ldg(p.skip + step.head);
    return in;
  }

  template <class Traits>
  __device__ void load(const Step<Traits>& step) {
    number = step.number(step.p.dt);
    value = step.value();
    if (Traits::kGdn) rate = step.number(step.p.beta);
  }

  __device__ float log(bool gdn) const { return gdn ? number : number * rate; }
};

// Weights of the committed records.
template <class Traits>
__device__ __forceinline__ Decay weigh(const Step<Traits>& step, const TokenScalars& in, const float (&number)[2],
                                       const float (&factor)[2]) {
  Decay decay;
  float log[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    log[half] = Traits::kGdn ? number[half] : number[half] * in.rate;
    decay.weight[half] = Traits::kGdn ? factor[half] : number[half];
  }
  decay.draftWeight = decay.draft = 0.0f;  // the token's follows its inputs
  decay.sumUp(log, step.pending(), 1, step.lane);
  return decay;
}

// `part`: the lane's part of the state times each vector, for the lane's row.
template <class Traits>
__device__ __forceinline__ void finishMamba2(const Step<Traits>& step, const float (&part)[1], const TokenScalars& in,
                                             const Decay& decay) {
  float sum[1];
  step.sumValues(sum);
  const float own = expf(decay.draft), all = expf(decay.total + decay.draft);
  const float value = Activation<typename Traits::Act>::toFloat(in.value);
  const float recalled = laneSum<Traits::kLanesPerRow>(fmaf(all, part[0], own * sum[0]));
  step.writeOutput(fmaf(fmaf(in.number, step.weight(step.pending(), 0), in.skip), value, recalled));
  step.appendValue(in.value);
  step.appendNumber(in.number);
}

template <class Traits>
__device__ __forceinline__ void finishGdn(const Step<Traits>& step, const float (&part)[2], const TokenScalars& in,
                                          const Decay& decay) {
  const int key = step.pending(), query = key + 1;
  const float own = expf(decay.draft), all = expf(decay.total + decay.draft);
  const float keyScale = 1.0f / sqrtf(step.weight(key, 0) + kNormEps);
  const float queryScale =
      1.0f / (sqrtf(step.weight(query, 1) + kNormEps) * sqrtf(static_cast<float>(Traits::kStateDim)));
  float sum[2];
  step.sumValues(sum);
  const float recalled = keyScale * laneSum<Traits::kLanesPerRow>(fmaf(all, part[0], own * sum[0]));
  const float read = queryScale * laneSum<Traits::kLanesPerRow>(fmaf(all, part[1], own * sum[1]));
  const float exact = in.rate * (Activation<typename Traits::Act>::toFloat(in.value) - recalled);
  const __half correction = __float2half_rn(fminf(fmaxf(exact, -kLargestHalf), kLargestHalf));
  step.writeOutput(fmaf(step.weight(key, 1) * keyScale * queryScale, __half2float(correction), read));
  step.appendValue(__half_as_ushort(correction));
  step.appendNumber(in.number);
  if (step.appendsKey() && step.lane == 0) step.ringFactors()[step.ringRow(step.pending())] = keyScale;
}

}  // namespace replayssm::plain
