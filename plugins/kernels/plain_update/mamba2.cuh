// A plain step of Mamba-2 (paper, Eq. 6): the query weighs every record by its key, the state is folded on a flush
// alone.
//
// A lane holds four columns of all rows of its warp.
#pragma once

#include "step.cuh"

namespace replayssm::plain {

template <class Traits>
struct Mamba2Step : Step<Traits> {
  using Act = typename Traits::Act;
  using Step<Traits>::p;
  using Step<Traits>::shared;
  using Step<Traits>::layout;
  using Step<Traits>::warp;
  using Step<Traits>::lane;
  using Step<Traits>::pending;
  using Step<Traits>::flushes;
  using Step<Traits>::ringRow;
  using Step<Traits>::weight;  // behind the records the product of the step's key and query
  static constexpr bool kWaitsLate = true;
  static constexpr int kResidentWarps = 24;  // of a multiprocessor: leaves a thread 80 registers
  static constexpr int kPassRows = 4;        // keys that a warp multiplies at a time

  using State = float4[Traits::kWarpRows];
  struct Inputs {
    uint2 key, query;
    float dt, a, skip;
    uint16_t value;  // of the lane's row
  };
  struct Records {
    Decay decay;
    uint2 keys[kPassRows];  // of the first pass
  };

  __device__ void loadState(State& s) const {
    const float* at = this->state() + lane * 4;
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) s[r] = loadOnce(at + r * Traits::kStateDim);
  }

  // What no predecessor makes.
  template <bool>
  __device__ Inputs expectInputs() const {
    Inputs in{};
    in.a = __ldg(p.a + this->head);
    if (p.skip != nullptr) in.skip = __ldg(p.skip + this->head);
    return in;
  }
  __device__ void loadInputs(Inputs& in) const {
    in.query = loadInput(this->vector(p.q) + lane);
    in.key = loadInput(this->vector(p.k) + lane);
    in.dt = loadInput(this->number(p.dt));
    in.value = loadInput(this->value());
  }

  // Weights of the committed records, and their loads.
  __device__ void startRecords(const Inputs& in, Records& records) const {
    float number[2], log[2];
    this->loadNumbers(number);
    loadKeys(records.keys, warp);
    this->loadValues();
    Decay& decay = records.decay;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      log[half] = number[half] * in.a;
      decay.weight[half] = number[half];
    }
    decay.draftWeight = decay.draft = 0.0f;  // the token's follows its inputs
    decay.sumUp(log, pending(), 1, lane);
  }

  __device__ uint2* key(int record) const {
    return reinterpret_cast<uint2*>(shared + record * Traits::kStateDim * 2) + lane;
  }
  // Committed keys first, first + kWarps, ..; zero from h on.
  __device__ void loadKeys(uint2 (&rows)[kPassRows], int first) const {
#pragma unroll
    for (int e = 0; e < kPassRows; ++e) {
      const int i = first + e * Traits::kWarps;
      const auto* row = reinterpret_cast<const uint2*>(this->ringKeys() + ringRow(i) * Traits::kStateDim);
      rows[e] = loadIf(i < pending(), row + lane);
    }
  }

  // Products of the query with all keys, of which the warp takes every kWarps-th, times what `decay` makes of a record.
  __device__ void weighRecords(const Inputs& in, Records& records) const {
    const Decay& decay = records.decay;
    uint2(&rows)[kPassRows] = records.keys;
    const int total = pending() + 1;
    for (int first = warp; first < total; first += kPassRows * Traits::kWarps) {
      if (first != warp) loadKeys(rows, first);
#pragma unroll
      for (int e = 0; e < kPassRows; ++e) {
        if (first + e * Traits::kWarps == pending()) rows[e] = in.key;
      }
      if (flushes()) {
#pragma unroll
        for (int e = 0; e < kPassRows; ++e) {
          if (first + e * Traits::kWarps < pending()) *key(first + e * Traits::kWarps) = rows[e];
        }
      }
      constexpr int kLanes = 32 / kPassRows;
      const int own = first + lane / kLanes * Traits::kWarps;
      float factor = __shfl_sync(kAllLanes, decay.weight[0], own & 31);
      if (pending() > 32) {
        const float upper = __shfl_sync(kAllLanes, decay.weight[1], own & 31);
        if (own >= 32) factor = upper;
      }
      if (own >= pending()) factor = 1.0f;
      const float4 vector = unpack<Act>(in.query);
      float sums[kPassRows];
#pragma unroll
      for (int e = 0; e < kPassRows; ++e) sums[e] = dot(unpack<Act>(rows[e]), vector);
      const float sum = reduceRows(sums, lane);
      if (lane % kLanes == 0 && own < total) weight(own) = factor * sum;
    }
  }

  // Sum over the records of weight times the value of the lane's row: the lane's part of it.
  __device__ float sumValues() const {
    const char* values = shared + layout.valueOffset + (warp * Traits::kWarpRows + lane / Traits::kLanesPerRow) * 2;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane % Traits::kLanesPerRow; i < pending(); i += Traits::kLanesPerRow) {
      const auto bits = *reinterpret_cast<const uint16_t*>(values + i * Traits::kPitch);
      sum = fmaf(weight(i), Activation<Act>::toFloat(bits), sum);
    }
    return sum;
  }

  // The fold of a flush: s = exp(total) s + sum of weight value key over the records, in float32, and the store.
  __device__ void fold(State& s, const Decay& decay) const {
    const float total = expf(decay.total);
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) {
      s[r] = make_float4(s[r].x * total, s[r].y * total, s[r].z * total, s[r].w * total);
    }
#pragma unroll 2
    for (int i = 0; i < pending(); ++i) {
      const float4 columns = unpack<Act>(*key(i));
      const float factor = decay.committed(i & ~7, i);
      float values[Traits::kWarpRows];
      const char* row = shared + layout.valueOffset + i * Traits::kPitch;
      unpack<Act>(*reinterpret_cast<const uint4*>(row + warp * Traits::kWarpRows * 2), values);
#pragma unroll
      for (int r = 0; r < Traits::kWarpRows; ++r) addScaled(s[r], 1.0f, factor * values[r], columns);
    }
    float* at = this->state() + lane * 4;
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) *reinterpret_cast<float4*>(at + r * Traits::kStateDim) = s[r];
  }

  // Nothing is folded before the inputs are there.
  __device__ void prepare(const State&, const Records&) const {}
  __device__ void flush(const State&) const {}

  // `release` lets the next launch begin.
  template <class Release>
  __device__ void finish(State& s, const Inputs& in, Records& records, const Release& release) const {
    Decay& decay = records.decay;
    decay.draft = in.dt * in.a;
    weighRecords(in, records);
    release();
    const float4 vector = unpack<Act>(in.query);
    float sums[Traits::kWarpRows];
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) sums[r] = dot(s[r], vector);
    const float part = dealRows(sums, lane);
    loadsDrain();
    __syncthreads();
    const float sum = sumValues();
    const float own = expf(decay.draft), all = expf(decay.total + decay.draft);
    const float value = Activation<Act>::toFloat(in.value);
    const float recalled = laneSum<Traits::kLanesPerRow>(fmaf(all, part, own * sum));
    this->writeOutput(fmaf(fmaf(in.dt, weight(pending()), in.skip), value, recalled));
    this->appendValue(in.value);
    this->appendNumber(in.dt);
    if (this->appendsKey()) this->newKey()[lane] = in.key;
    if (flushes()) fold(s, decay);
  }
};

}  // namespace replayssm::plain
