// Plain decoding (T = 1) with the state in registers: what a CTA's step of either family is and where its tensors lie.
//
// A CTA takes kRows rows of one head of one batch row; a warp has kWarpRows of them. The state is on its way before the
// cursors are known, everything else before anything is used. Only records 0..h-1 (ring) and the step's token are ever
// read.
#pragma once

#include "../common/input.cuh"
#include "../common/mbarrier.cuh"
#include "../common/row_math.cuh"
#include "../common/store_again.cuh"
#include "../common/vector.cuh"
#include "../replay_update/decay.cuh"
#include "../replay_update/row_info.cuh"

namespace replayssm::plain {

template <Family kFamily_, class Act_, int kHeadDim_, int kStateDim_, int kWarps_, int kWarpRows_,
          bool kFolds_>
struct PlainTraits {
  static constexpr bool kGdn = kFamily_ == Family::gdn;
  using Act = Act_;
  using Value = std::conditional_t<kGdn, __half, Act_>;  // what a record's values are
  static constexpr int kHeadDim = kHeadDim_;    // P
  static constexpr int kStateDim = kStateDim_;  // N
  static constexpr int kWarps = kWarps_;        // of a CTA
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = kWarpRows_;  // of the state
  static constexpr bool kFolds = kFolds_;  // GDN: at every step, not on a flush alone
  static constexpr int kLanesPerRow = 32 / kWarpRows;  // that hold a row's sum
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kParts = kHeadDim / kRows;  // CTAs of a head
  static constexpr int kPitch = kRows * 2 + 16;    // bytes of a record's values; the extra ones spread rows over banks

  static_assert(sizeof(Act) == 2, "activations are 16-bit");
  static_assert(kStateDim == 128, "four columns a lane, or twice four");
  static_assert(kHeadDim % kRows == 0, "whole CTAs a head");
};

// Shared memory: keys of the records (Mamba-2: on a flush), their values, what each weighs and one number more; GDN:
// values times weights of each warp's rows where the records are folded, else what they weigh for the key and the query.
struct PlainLayout {
  int32_t valueOffset, weightOffset, weighedOffset, bytes;
};

template <class Traits>
PlainLayout plainLayout(int window) {
  PlainLayout layout{};
  layout.valueOffset = window * Traits::kStateDim * 2;
  layout.weightOffset = layout.valueOffset + window * Traits::kPitch;
  layout.weighedOffset = roundUp(layout.weightOffset + (window + 1) * 4, 16);
  layout.bytes = layout.weighedOffset + (Traits::kGdn ? window * Traits::kRows * 4 : 0);
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
  const int row, group, head, part, warp, lane;
  RowInfo info{-1, 0, 0, 0};

  __device__ int pending() const { return info.pending; }
  __device__ bool flushes() const { return info.pending + 1 > p.window; }
  __device__ int firstRow() const { return part * Traits::kRows + warp * Traits::kWarpRows; }  // of the warp
  __device__ int laneRow() const { return firstRow() + lane / Traits::kLanesPerRow; }

  // Ring row of record i.
  __device__ int ringRow(int i) const {
    const int r = info.origin + i;
    return r < p.ringRows ? r : r - p.ringRows;
  }

  // The warp's rows.
  __device__ float* state() const {
    return p.checkpoint + info.slot * p.checkpointSlotStride +
           (static_cast<int64_t>(head) * Traits::kHeadDim + firstRow()) * Traits::kStateDim;
  }
  __device__ Act* ringKeys() const {
    return static_cast<Act*>(p.ringKey) + info.slot * p.ringKeySlotStride +
           static_cast<int64_t>(group) * p.ringRows * Traits::kStateDim;
  }
  __device__ typename Traits::Value* ringValues() const {
    return static_cast<typename Traits::Value*>(p.ringValue) + info.slot * p.ringValueSlotStride +
           static_cast<int64_t>(head) * p.ringRows * Traits::kHeadDim;
  }
  __device__ float* ringNumbers() const {
    return p.ringDt + info.slot * p.ringDtSlotStride + static_cast<int64_t>(head) * p.ringRows;
  }
  __device__ float* ringFactors() const {
    return p.ringKeyFactor + info.slot * p.ringKeyFactorSlotStride + static_cast<int64_t>(group) * p.ringRows;
  }

  // The step's key or query.
  __device__ const uint2* vector(const TokenTensor& t) const {
    return reinterpret_cast<const uint2*>(static_cast<const Act*>(t.data) + row * t.rowStride + group * t.headStride);
  }
  __device__ const float* number(const TokenTensor& t) const {
    return static_cast<const float*>(t.data) + row * t.rowStride + head * t.headStride;
  }
  // The step's value of the lane's row.
  __device__ const uint16_t* value() const {
    return static_cast<const uint16_t*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride + laneRow();
  }
  __device__ uint16_t* out() const {
    return static_cast<uint16_t*>(p.out) + row * p.outRowStride + head * p.outHeadStride;
  }

  // What a record weighs, for Mamba-2's query or in GDN's state; the number behind them is the family's.
  __device__ float& weight(int record) const { return reinterpret_cast<float*>(shared + layout.weightOffset)[record]; }

  // Starts the copies of the CTA's part of the records' values.
  __device__ void loadValues() const {
    constexpr int kPieces = Traits::kRows / 8;
    const auto* ring = ringValues() + part * Traits::kRows;
#pragma unroll 1
    for (int i = threadIdx.x; i < pending() * kPieces; i += Traits::kThreads) {
      const int record = i / kPieces, piece = i % kPieces;
      pieceLoad(sharedAddress(shared) + layout.valueOffset + record * Traits::kPitch + piece * 16,
                ring + ringRow(record) * Traits::kHeadDim + piece * 8);
    }
  }

  // dt or log-decay of records `lane` and `lane + 32`; zero from h on.
  __device__ void loadNumbers(float (&number)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane + 32 * half;
      number[half] = i < pending() ? __ldcg(ringNumbers() + ringRow(i)) : 0.0f;
    }
  }

  __device__ bool leadsGroup() const { return part == 0 && head == group * p.headsPerGroup; }
  // This step's key, by one warp of the group.
  __device__ bool appendsKey() const { return warp == 0 && leadsGroup(); }
  __device__ uint2* newKey() const {
    return reinterpret_cast<uint2*>(ringKeys() + ringRow(pending()) * Traits::kStateDim);
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
    if (lane % Traits::kLanesPerRow == 0) storeAgain(out() + laneRow(), Activation<Act>::fromFloat(value));
  }
};

}  // namespace replayssm::plain
