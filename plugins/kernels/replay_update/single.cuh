// What a consumer warp does with an item of a plain Mamba-2 step (T = 1; paper, Eq. 6).
//
// The heads of a chunk share keys and query, so the query's products with the keys are made once a chunk and kept by the
// lanes. What is left of an item: one scan of its log-decays, which gives the weights of all records and of the
// state, the state's float32 FMA, two rows of values a record, and one sum over the lanes of a row for all of it.
//
// Lane (g, c) = (lane / 4, lane % 4) has rows 2g and 2g + 1 of the warp's 16, of each block of 32 columns 8c..8c+7, and of
// each 8 records 2c and 2c + 1.
#pragma once

#include "../common/store_again.cuh"
#include "consumer.cuh"
#include "few.cuh"

namespace replayssm {

template <class Traits>
struct SingleConsumer : ConsumerBase<Traits> {
  using Act = typename Traits::Act;
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::warp;
  using ConsumerBase<Traits>::lane;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kColumns = 8;
  float query[Traits::kBlocks][kColumns];  // in the order in which the lane reads its columns
  float product[2] = {};                   // <k, q> of the lane's records
  float ownProduct = 0.0f;                 // of this step's token

  __device__ static Vectors<Traits> packedQuery(const char* rows, int lane) {
    Vectors<Traits> q;
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      q.part[0][b] = *reinterpret_cast<const uint4*>(rows + b * 64 + lane % 4 * 16);
    }
    return q;
  }

  // The query, once a chunk. Odd g read the halves of their columns in the other order: see loadColumns.
  __device__ void loadVectors(const ItemHeader&, const char* keys) {
    using A = Activation<Act>;
    const Vectors<Traits> q = packedQuery(keys + layout.queryOffset, lane);
    const bool odd = (lane & 4) != 0;
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      const uint4 v = q.part[0][b];
      const uint32_t words[4] = {odd ? v.z : v.x, odd ? v.w : v.y, odd ? v.x : v.z, odd ? v.y : v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        query[b][2 * i] = A::low(words[i]);
        query[b][2 * i + 1] = A::high(words[i]);
      }
    }
  }

  // The query's products with the keys, once a chunk.
  __device__ void loadProducts(const ItemHeader& item, const char* keys) {
    const Vectors<Traits> q = packedQuery(keys + layout.queryOffset, lane);
    const int pending = item.pending();
    const int place = pending <= kFewRecords ? lane - 1 : lane, source = (place & 7) >> 1;
    product[0] = product[1] = 0.0f;
#pragma unroll 1
    for (int first = 0; first <= pending; first += 8) {
      float dot[4];  // by every g: records first + 2c, first + 2c + 1
      keyDots<Traits>(dot, keys, first, pending + 1, q, 0, lane);
      const float even = __shfl_sync(kAllLanes, dot[0], source), odd = __shfl_sync(kAllLanes, dot[1], source);
      const float value = (place & 1) != 0 ? odd : even;
      const bool mine = static_cast<uint32_t>(place - (first & 31)) < 8u;
      if (mine && first < 32) product[0] = value;
      if (mine && first >= 32 && first < 64) product[1] = value;
      if (pending - first < 8) {
        ownProduct = __shfl_sync(kAllLanes, (pending & 1) != 0 ? dot[1] : dot[0], (pending & 7) >> 1);
      }
    }
  }

  __device__ void appendKeys(const ItemHeader& item, const char* keys) const { this->appendKeyRows(item, keys); }

  // Whether the keys are not needed any more once the chunk's products are made.
  __device__ bool keysDone(const ItemHeader& item) const { return item.pending() + 1 <= p.window; }

  // The token's values and dt into ring row h (behind the committed ones; nobody reads that now): a whole line by one warp,
  // another one for each head. `values`: of the head's first row.
  __device__ void appendRecord(const ItemHeader& item, const char* values, float dt) const {
    if (warp != item.head() % Traits::kWarps || lane * 8 >= Traits::kHeadDim) return;
    const int64_t row = static_cast<int64_t>(item.head()) * p.ringRows + this->ringRow(item, 0);
    Act* ring = static_cast<Act*>(p.ringValue) + item.slot * p.ringValueSlotStride + row * Traits::kHeadDim + lane * 8;
    *reinterpret_cast<uint4*>(ring) =
        *reinterpret_cast<const uint4*>(values + item.pending() * Traits::kValuePitch + lane * 16);
    if (lane == 0) p.ringDt[item.slot * p.ringDtSlotStride + row] = dt;
  }

  __device__ void writeOutput(const ItemHeader& item, float even, float odd) const {
    if (lane % 4 > 1) return;
    const int element = warp * kSlab + lane / 4 * 2 + lane % 4;
    uint16_t* out = static_cast<uint16_t*>(p.out) + item.row * p.outRowStride + item.head() * p.outHeadStride + element;
    storeAgain(out, Activation<Act>::fromFloat(lane % 4 == 0 ? even : odd));
  }

  __device__ void writeZeros(const ItemHeader& item) const { writeOutput(item, 0.0f, 0.0f); }

  // The lane's part of S q for its two rows, not decayed yet: needs the state and the query only.
  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const ItemHeader&, const char* stage) const {
    const bool odd = (lane & 4) != 0;
    const float* slab = reinterpret_cast<const float*>(stage) + warp * kSlab * Traits::kStateDim;
    const float* row = slab + lane / 4 * 2 * Traits::kStateDim + lane % 4 * kColumns;
    float part[2][2] = {};
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      const float* q = query[b];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* at = row + r * Traits::kStateDim + b * kBlock;
        const float4 x = *reinterpret_cast<const float4*>(at + (odd ? 4 : 0));
        const float4 y = *reinterpret_cast<const float4*>(at + (odd ? 0 : 4));
        part[r][0] = fmaf(x.w, q[3], fmaf(x.z, q[2], fmaf(x.y, q[1], fmaf(x.x, q[0], part[r][0]))));
        part[r][1] = fmaf(y.w, q[7], fmaf(y.z, q[6], fmaf(y.y, q[5], fmaf(y.x, q[4], part[r][1]))));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[0][r] = part[r][0] + part[r][1];
  }

  // Records first..first+7, whose weights are with lanes `at`..`at` + 7.
  __device__ void addRecords(float (&sum)[2], const char* values, float weight, int at, int first, int pending) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * (lane % 4) + e, record = first + i;
      const float w = __shfl_sync(kAllLanes, weight, at + i);
      uint32_t pair = 0;
      if (record < pending) {
        pair = *reinterpret_cast<const uint32_t*>(values + record * Traits::kValuePitch + lane / 4 * 4);
      }
      sum[0] = fmaf(w, Activation<Act>::low(pair), sum[0]);
      sum[1] = fmaf(w, Activation<Act>::high(pair), sum[1]);
    }
  }

  // sum = the lane's part of all committed records; returns what the state is to be multiplied by. `ownLog`: of the token.
  __device__ float sumFew(float (&sum)[2], const char* values, const float* dt, float a, float ownLog,
                          int pending) const {
    // Lane l: log-decay of records l and later, which is what has happened since record l - 1; lane 0 the state's.
    const float before = lane > 0 && lane <= pending ? dt[lane - 1] : 0.0f;
    float log = lane < pending ? dt[lane] * a : 0.0f;
#pragma unroll
    for (int d = 1; d < kFewRecords; d *= 2) log += __shfl_down_sync(kAllLanes, log, d);  // lanes from 16 on add zeros
    const float decay = expf(log + ownLog);
    const float weight = decay * before * product[0];
    if (pending > 0) addRecords(sum, values, weight, 1, 0, pending);
    if (pending > 8) addRecords(sum, values, weight, 9, 8, pending);
    return __shfl_sync(kAllLanes, decay, 0);
  }

  // The same for any number of records.
  __device__ float sumMany(float (&sum)[2], const char* values, const float* dt, float a, float ownLog,
                           int pending) const {
    Decay decay;
    decay.loadMamba2(dt, a, pending, 1, lane);
    const float own = expf(ownLog);
    const float lower = decay.weight[0] * own * product[0], upper = decay.weight[1] * own * product[1];
#pragma unroll 1
    for (int first = 0; first < pending; first += 8) {
      addRecords(sum, values, first < 32 ? lower : upper, first & 31, first, pending);
    }
    return expf(decay.total + ownLog);
  }

  // The rest, with all of the item in place.
  __device__ void finishItem(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage, const char* keys) {
    using A = Activation<Act>;
    const int pending = item.pending();
    const char* values = stage + layout.valueOffset + warp * kSlab * 2;
    const float* dt = reinterpret_cast<const float*>(stage + layout.dtOffset);
    const float2 scalars = *reinterpret_cast<const float2*>(stage + layout.scalarOffset);  // a, D
    const float own = dt[pending], ownLog = own * scalars.x;
    float records[2] = {};
    const float factor = pending <= kFewRecords ? sumFew(records, values, dt, scalars.x, ownLog, pending)
                                                : sumMany(records, values, dt, scalars.x, ownLog, pending);
    const float weight = fmaf(own, ownProduct, p.skip != nullptr ? scalars.y : 0.0f);
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(values + pending * Traits::kValuePitch + lane / 4 * 4);
    float out[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = fmaf(factor, sum[0][r], records[r]);
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      out[r] = fmaf(weight, r == 0 ? A::low(pair) : A::high(pair), total);
    }
    writeOutput(item, out[0], out[1]);
    appendRecord(item, stage + layout.valueOffset, own);
    if (keysDone(item)) return;
    Decay decay;
    decay.loadMamba2(dt, scalars.x, pending, 1, lane);
    float* slab = reinterpret_cast<float*>(stage) + warp * kSlab * Traits::kStateDim;
    this->template flush<Act>(item, slab, keys, values, decay);
    if (lane == 0) bulkWaitRead();
  }
};

}  // namespace replayssm
