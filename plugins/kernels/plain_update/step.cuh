// Plain decoding (T = 1) of either family with the state in registers: what a CTA's step is, its loads and its products.
//
// A CTA takes kRows rows of one head of one batch row; a warp has kWarpRows of them, four columns a lane. The state is on
// its way before the cursors are known, everything else before anything is used. Only records 0..h-1 (ring) and the step's
// token are ever read.
#pragma once

#include "../common/input.cuh"
#include "../common/mbarrier.cuh"
#include "../common/row_math.cuh"
#include "../common/vector.cuh"
#include "../replay_update/decay.cuh"
#include "../replay_update/row_info.cuh"

namespace replayssm::plain {

template <Family kFamily_, class Act_, int kHeadDim_, int kStateDim_, int kWarps_>
struct PlainTraits {
  static constexpr bool kGdn = kFamily_ == Family::gdn;
  using Act = Act_;
  using Value = std::conditional_t<kGdn, __half, Act_>;  // what a record's values are
  static constexpr int kHeadDim = kHeadDim_;    // P
  static constexpr int kStateDim = kStateDim_;  // N
  static constexpr int kWarps = kWarps_;        // of a CTA
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 8;
  static constexpr int kLanesPerRow = 32 / kWarpRows;  // that hold a row's sum
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kParts = kHeadDim / kRows;  // CTAs of a head
  static constexpr int kVectors = kGdn ? 2 : 1;    // that the state is multiplied by: key, query; Mamba-2 the query
  static constexpr int kPassRows = 4;  // keys that a warp multiplies at a time
  static constexpr int kPitch = kRows * 2 + 16;    // bytes of a record's values; the extra ones spread rows over banks

  static_assert(sizeof(Act) == 2, "activations are 16-bit");
  static_assert(kStateDim == 128, "four columns a lane");
  static_assert(kHeadDim % kRows == 0, "whole CTAs a head");
};

// Shared memory: keys of the records (on a flush), their values, then what each weighs for each vector and the products of
// the vectors with the step's key and (GDN) query.
struct PlainLayout {
  int32_t valueOffset, weightOffset, bytes;
};

template <class Traits>
PlainLayout plainLayout(int window) {
  PlainLayout layout{};
  layout.valueOffset = window * Traits::kStateDim * 2;
  layout.weightOffset = layout.valueOffset + window * Traits::kPitch;
  layout.bytes = layout.weightOffset + (window + Traits::kVectors) * Traits::kVectors * 4;
  return layout;
}

// 16 bytes of a state, read once: not kept in the L1.
__device__ __forceinline__ float4 loadOnce(const float* at) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

template <class Traits>
struct Step {
  using Act = typename Traits::Act;
  const UpdateParams& p;
  char* const shared;
  const PlainLayout& layout;
  const int row, head, part, warp, lane;
  RowInfo info{-1, 0, 0, 0};

  __device__ int pending() const { return info.pending; }
  __device__ bool flushes() const { return info.pending + 1 > p.window; }
  __device__ int group() const { return head / p.headsPerGroup; }
  __device__ int firstRow() const { return part * Traits::kRows + warp * Traits::kWarpRows; }  // of the warp
  __device__ int laneRow() const { return firstRow() + lane / Traits::kLanesPerRow; }

  // Ring row of record i.
  __device__ int ringRow(int i) const {
    const int r = info.origin + i;
    return r < p.ringRows ? r : r - p.ringRows;
  }

  __device__ float* state() const {
    return p.checkpoint + info.slot * p.checkpointSlotStride +
           (static_cast<int64_t>(head) * Traits::kHeadDim + firstRow()) * Traits::kStateDim + lane * 4;
  }
  __device__ Act* ringKeys() const {
    return static_cast<Act*>(p.ringKey) + info.slot * p.ringKeySlotStride +
           static_cast<int64_t>(group()) * p.ringRows * Traits::kStateDim;
  }
  __device__ typename Traits::Value* ringValues() const {
    return static_cast<typename Traits::Value*>(p.ringValue) + info.slot * p.ringValueSlotStride +
           static_cast<int64_t>(head) * p.ringRows * Traits::kHeadDim;
  }
  __device__ float* ringNumbers() const {
    return p.ringDt + info.slot * p.ringDtSlotStride + static_cast<int64_t>(head) * p.ringRows;
  }
  __device__ float* ringFactors() const {
    return p.ringKeyFactor + info.slot * p.ringKeyFactorSlotStride + static_cast<int64_t>(group()) * p.ringRows;
  }

  // The lane's columns of the step's key or query.
  __device__ const uint2* vector(const TokenTensor& t) const {
    return reinterpret_cast<const uint2*>(static_cast<const Act*>(t.data) + row * t.rowStride + group() * t.headStride) +
           lane;
  }
  __device__ float number(const TokenTensor& t) const {
    return loadInput(static_cast<const float*>(t.data) + row * t.rowStride + head * t.headStride);
  }
  // The step's value of the lane's row.
  __device__ uint16_t value() const {
    return loadInput(static_cast<const uint16_t*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride +
                     laneRow());
  }
  __device__ uint16_t* out() const {
    return static_cast<uint16_t*>(p.out) + row * p.outRowStride + head * p.outHeadStride;
  }

  __device__ void loadState(float4 (&s)[Traits::kWarpRows]) const {
    const float* at = state();
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) s[r] = loadOnce(at + r * Traits::kStateDim);
  }

  // Starts the copies of the CTA's part of the records' values.
  __device__ void loadValues() const {
    constexpr int kPieces = Traits::kRows / 8;
    const auto* ring = ringValues() + part * Traits::kRows;
    for (int i = threadIdx.x; i < pending() * kPieces; i += Traits::kThreads) {
      const int record = i / kPieces, piece = i % kPieces;
      pieceLoad(sharedAddress(shared) + layout.valueOffset + record * Traits::kPitch + piece * 16,
                ring + ringRow(record) * Traits::kHeadDim + piece * 8);
    }
  }

  // dt or log-decay, and the key factor (GDN), of records `lane` and `lane + 32`; zero from h on.
  __device__ void loadNumbers(float (&number)[2], float (&factor)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane + 32 * half;
      const bool given = i < pending();
      number[half] = given ? __ldcg(ringNumbers() + ringRow(i)) : 0.0f;
      factor[half] = Traits::kGdn && given ? __ldcg(ringFactors() + ringRow(i)) : 0.0f;
    }
  }

  __device__ uint2* key(int record) const {
    return reinterpret_cast<uint2*>(shared + record * Traits::kStateDim * 2) + lane;
  }
  // What a record weighs for a vector; behind the records the vector's products with the step's key, then query.
  __device__ float& weight(int record, int vector) const {
    return reinterpret_cast<float*>(shared + layout.weightOffset)[record * Traits::kVectors + vector];
  }

  // Committed keys first, first + kWarps, ..; zero from h on.
  __device__ void loadKeys(uint2 (&rows)[Traits::kPassRows], int first) const {
#pragma unroll
    for (int e = 0; e < Traits::kPassRows; ++e) {
      const int i = first + e * Traits::kWarps;
      rows[e] = loadIf(i < pending(), reinterpret_cast<const uint2*>(ringKeys() + ringRow(i) * Traits::kStateDim) + lane);
    }
  }

  // Products of the vectors with all keys, of which the warp takes every kWarps-th, times what `decay` makes of a record.
  // `rows`: committed keys of the first pass.
  __device__ void weighRecords(const uint2 (&vectors)[Traits::kVectors], const uint2& ownKey, const Decay& decay,
                               uint2 (&rows)[Traits::kPassRows]) const {
    const int total = pending() + Traits::kVectors;
    for (int first = warp; first < total; first += Traits::kPassRows * Traits::kWarps) {
      if (first != warp) loadKeys(rows, first);
#pragma unroll
      for (int e = 0; e < Traits::kPassRows; ++e) {
        const int i = first + e * Traits::kWarps;
        if (i == pending()) rows[e] = ownKey;
        if (Traits::kGdn && i == pending() + 1) rows[e] = vectors[1];
      }
      if (flushes()) {
#pragma unroll
        for (int e = 0; e < Traits::kPassRows; ++e) {
          if (first + e * Traits::kWarps < pending()) *key(first + e * Traits::kWarps) = rows[e];
        }
      }
      constexpr int kLanes = 32 / Traits::kPassRows;
      const int own = first + lane / kLanes * Traits::kWarps;
      float factor = __shfl_sync(kAllLanes, decay.weight[0], own & 31);
      if (pending() > 32) {
        const float upper = __shfl_sync(kAllLanes, decay.weight[1], own & 31);
        if (own >= 32) factor = upper;
      }
      if (own >= pending()) factor = 1.0f;
#pragma unroll
      for (int v = 0; v < Traits::kVectors; ++v) {
        const float4 vector = unpack<Act>(vectors[v]);
        float sums[Traits::kPassRows];
#pragma unroll
        for (int e = 0; e < Traits::kPassRows; ++e) sums[e] = dot(unpack<Act>(rows[e]), vector);
        const float sum = reduceRows(sums, lane);
        if (lane % kLanes == 0 && own < total) weight(own, v) = factor * sum;
      }
    }
  }

  // Sums over the records of weight times the value of the lane's row: the lane's part of them.
  __device__ void sumValues(float (&sum)[Traits::kVectors]) const {
    const char* values = shared + layout.valueOffset + (warp * Traits::kWarpRows + lane / Traits::kLanesPerRow) * 2;
#pragma unroll
    for (int v = 0; v < Traits::kVectors; ++v) sum[v] = 0.0f;
#pragma unroll 4
    for (int i = lane % Traits::kLanesPerRow; i < pending(); i += Traits::kLanesPerRow) {
      const auto bits = *reinterpret_cast<const uint16_t*>(values + i * Traits::kPitch);
      const float value = Activation<typename Traits::Value>::toFloat(bits);
#pragma unroll
      for (int v = 0; v < Traits::kVectors; ++v) sum[v] = fmaf(weight(i, v), value, sum[v]);
    }
  }

  // The flush: s = exp(total) s + sum of weight value key over the records, in float32, and the store.
  __device__ void fold(float4 (&s)[Traits::kWarpRows], const Decay& decay) const {
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
      unpack<typename Traits::Value>(
          *reinterpret_cast<const uint4*>(shared + layout.valueOffset + i * Traits::kPitch + warp * Traits::kWarpRows * 2),
          values);
#pragma unroll
      for (int r = 0; r < Traits::kWarpRows; ++r) addScaled(s[r], 1.0f, factor * values[r], columns);
    }
    float* at = state();
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) *reinterpret_cast<float4*>(at + r * Traits::kStateDim) = s[r];
  }

  __device__ bool leadsGroup() const { return part == 0 && head == group() * p.headsPerGroup; }
  // This step's key, by one warp of the group.
  __device__ bool appendsKey() const { return warp == 0 && leadsGroup(); }
  __device__ void appendKey(const uint2& key) const {
    *(reinterpret_cast<uint2*>(ringKeys() + ringRow(pending()) * Traits::kStateDim) + lane) = key;
  }
  // This step's dt or log-decay, by one lane of the head.
  __device__ void appendNumber(float number) const {
    if (part == 0 && warp == 0 && lane == 0) ringNumbers()[ringRow(pending())] = number;
  }
  // This step's value or correction of the lane's row.
  __device__ void appendValue(uint16_t bits) const {
    if (lane % Traits::kLanesPerRow != 0) return;
    reinterpret_cast<uint16_t*>(ringValues())[ringRow(pending()) * Traits::kHeadDim + laneRow()] = bits;
  }
  __device__ void writeOutput(float value) const {
    if (lane % Traits::kLanesPerRow == 0) out()[laneRow()] = Activation<Act>::fromFloat(value);
  }
};

}  // namespace replayssm::plain
