// Plain decoding of Mamba-2 without a flush, by CTAs that stay. Every warp streams its own heads of the CTA's range through
// private stages. What the heads of a row and group share (products of keys and query, the query's fragments) is made
// while those of the group before are streamed, so that only a CTA's first group is waited for.
#pragma once

#include "../common/store_again.cuh"
#include "kernels/common/warp_arrival.cuh"
#include "resident_loads.cuh"

namespace replayssm {

template <class Traits>
struct ResidentReads : ResidentLoads<Traits> {
  using Loads = ResidentLoads<Traits>;
  using Act = typename Traits::Act;
  using typename Loads::Span;
  using typename Loads::Steps;
  using typename Loads::Walk;
  using Loads::advance;
  using Loads::kKeyPieces;
  using Loads::kPieces;
  using Loads::lane;
  using Loads::layout;
  using Loads::loadCommitted;
  using Loads::loadKeys;
  using Loads::loadSteps;
  using Loads::loadToken;
  using Loads::loadVectors;
  using Loads::ownFrom;
  using Loads::p;
  using Loads::range;
  using Loads::shared;
  using Loads::spanFrom;
  using Loads::stage;
  using Loads::stageBarrier;
  using Loads::start;
  using Loads::valid;
  using Loads::warp;

  __device__ Part<Traits> partOf(const Span& span, int use) const {
    const int inRow = span.first - range.rowStart(span.row);
    return {p, layout, shared, warp, lane, span.id, span.info.slot, 1, span.info.origin,
            span.info.pending, span.group, inRow, span.end - span.first, 1, shared + use % 2 * layout.pairBytes};
  }

  // What the span's heads share: the first warp multiplies keys, the last one makes the fragments, the second one appends
  // the key.
  __device__ void prepare(const Span& span, int use) const {
    const uint32_t base = sharedAddress(shared);
    const Part<Traits> part = partOf(span, use);
    barrierWait(base + kLandedBarrier, use & 1);
    if (warp == 0) part.multiplyTile(part.dots(), 0, part.pending + 1);
    if (warp == Traits::kWarps - 1) QueryFragments<Traits>::make(part);
    if (warp == 1 && part.firstHead == span.group * p.headsPerGroup && lane < kKeyPieces) {
      Act* ring = static_cast<Act*>(p.ringKey) + part.slot * p.ringKeySlotStride +
                  (static_cast<int64_t>(span.group) * p.ringRows + part.ringRow(part.pending)) * Traits::kStateDim;
      *reinterpret_cast<uint4*>(ring + lane * 8) =
          *reinterpret_cast<const uint4*>(part.keys() + part.pending * Traits::kKeyPitch + lane * 16);
    }
    __syncwarp();
    if (kEveryLaneArrives || lane == 0) barrierArrive(base + kReadyBarrier);
  }

  // Weights of this warp's heads of the span, and their step sizes into the ring.
  __device__ void setWeights(const Part<Traits>& part, const Span& span, const Steps& steps, float factor) const {
    const PlainScan scan(steps.record, steps.token, steps.a, lane);
    const int head = ownFrom(span.first) + lane / 8 * Traits::kWarps;
    if constexpr (Traits::kRead == StateFormat::kE2m1) factor *= steps.headScale;
    float weight[2];
    plainWeightsOf(weight, scan, part, steps.skip);
    if (head < span.end) {
      float* at = plainWeights(part, warp + lane / 8 * Traits::kWarps);
      *reinterpret_cast<float2*>(at + 2 * scan.r) = make_float2(weight[0], weight[1]);
      if (scan.r == 0) {
        at[16] = factor * expf(scan.total + scan.tokenLog);
        p.ringDt[part.slot * p.ringDtSlotStride +
                 static_cast<int64_t>(head - range.rowStart(span.row)) * p.ringRows + part.ringRow(part.pending)] =
            steps.token;
      }
    }
    __syncwarp();
  }

  // Sums of the four slabs from `first` on (kBlockColumns), whose lanes have shares, dealt out to them: lane c gets rows g
  // and g + 8 of slab first + c. The order of the sum is the same for every lane.
  __device__ float2 dealSlabs(const float (&sum)[Traits::kSlabs][4], int first) const {
    const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
    float total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float share[4], pair[2];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        share[m] = first + m < Traits::kSlabs
                       ? sum[min(first + m, Traits::kSlabs - 1)][2 * half] +
                             sum[min(first + m, Traits::kSlabs - 1)][2 * half + 1]
                       : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sent = odd ? share[2 * i] : share[2 * i + 1];
        pair[i] = (odd ? share[2 * i + 1] : share[2 * i]) + __shfl_xor_sync(kAllLanes, sent, 1);
      }
      const float sent = upper ? pair[0] : pair[1];
      total[half] = (upper ? pair[1] : pair[0]) + __shfl_xor_sync(kAllLanes, sent, 2);
    }
    return make_float2(total[0], total[1]);
  }

  // Output of a head (kBlockColumns).
  __device__ void writeRows(const float (&sum)[Traits::kSlabs][4], uint16_t* out) const {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int first = 0; first < Traits::kSlabs; first += 4) {
      uint16_t* at = out + (first + c) * 16 + g;
      float2 rows;
      if (first + 1 == Traits::kSlabs) {  // the only one left: every lane gets its sums
        float total[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          total[half] = sum[first][2 * half] + sum[first][2 * half + 1];
          total[half] += __shfl_xor_sync(kAllLanes, total[half], 1);
          total[half] += __shfl_xor_sync(kAllLanes, total[half], 2);
        }
        rows = make_float2(total[0], total[1]);
      } else {
        rows = dealSlabs(sum, first);
      }
      if (first + c < Traits::kSlabs) {
        at[0] = Activation<Act>::fromFloat(rows.x);
        at[8] = Activation<Act>::fromFloat(rows.y);
      }
    }
  }

  // Where a head's output and its token's place in the ring are, the latter for this lane's piece.
  struct Target {
    uint16_t* out;
    char* append;
  };
  __device__ Target targetOf(const Part<Traits>& part, int head) const {
    const int64_t place = static_cast<int64_t>(head) * p.ringRows + part.ringRow(part.pending);
    return {reinterpret_cast<uint16_t*>(static_cast<Act*>(p.out) + part.row * p.outRowStride + head * p.outHeadStride),
            reinterpret_cast<char*>(static_cast<Act*>(p.ringValue) + part.slot * p.ringValueSlotStride +
                                    place * Traits::kHeadDim) +
                lane * 16};
  }
  __device__ void advance(Target& target) const {
    target.out += Traits::kWarps * p.outHeadStride;
    target.append += Traits::kWarps * Traits::kHeadDim * 2 * p.ringRows;
  }

  // One item: the warp's head number `round` of the span.
  __device__ void finish(const Part<Traits>& part, const QueryFragments<Traits>& q, int round, const Target& target,
                         const char* at) const {
    float sum[Traits::kSlabs][4];
    readState(sum, at, q, lane);
    const char* values = at + layout.valueOffset;
    addPlainRecords(sum, part, warp + round * Traits::kWarps, sharedAddress(values));
    if constexpr (Traits::kBlockColumns) {
      writeRows(sum, target.out);
    } else if (lane % 4 == 0) {
#pragma unroll
      for (int m = 0; m < Traits::kSlabs; ++m) {
        storeAgain(target.out + m * 16 + lane / 4, Activation<Act>::fromFloat(sum[m][0]));
        storeAgain(target.out + m * 16 + lane / 4 + 8, Activation<Act>::fromFloat(sum[m][2]));
      }
    }
    if (lane < kPieces) {
      *reinterpret_cast<uint4*>(target.append) =
          *reinterpret_cast<const uint4*>(values + part.pending * Traits::kValuePitch + lane * 16);
    }
    __syncwarp();
  }

  // Zeros for the range's heads of rows without a token.
  __device__ void writeZeros() const {
#pragma unroll 1
    for (uint32_t rest = range.idles; rest != 0; rest &= rest - 1) {
      const int row = __ffs(static_cast<int>(rest)) - 1, start = range.rowStart(row);
      const int end = min(start + p.heads, range.end);
#pragma unroll 1
      for (int head = max(start, range.begin) + warp; head < end; head += Traits::kWarps) {
        uint16_t* out = reinterpret_cast<uint16_t*>(static_cast<Act*>(p.out) +
                                                    range.idOf(row) * p.outRowStride +
                                                    (head - start) * p.outHeadStride);
        for (int i = lane; i < Traits::kHeadDim; i += 32) out[i] = 0;
      }
    }
  }

  __device__ void run() const {
    Span span{range.begin, range.begin, 0, 0, 0, {}}, next = spanFrom(range.begin);
    Walk walk = start(next);
    writeZeros();
    QueryFragments<Traits> q{};
    int s = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int use = 0;; ++use) {
      Steps steps{};
      if (valid(next)) {
        if (use > 0) loadKeys(next);
        loadVectors(next);
        steps = loadSteps(next);
      }
      const Part<Traits> part = partOf(span, use + 1);
      Target target = targetOf(part, ownFrom(span.first) - range.rowStart(span.row));
      bool more = true;
#pragma unroll 1
      for (int own = ownFrom(span.first), round = 0; more; own += Traits::kWarps, ++round) {
        more = own + Traits::kWarps < span.end;
        if (!more && valid(next)) prepare(next, use);
        if (own >= span.end) break;
        barrierWait(stageBarrier(s), parity);
        finish(part, q, round, target, stage(s));
        advance(target);
        if (valid(walk)) {
          loadCommitted(walk, s);
          loadToken(walk, s);
          advance(walk);
        }
        if (++s == layout.stages) {
          s = 0;
          parity ^= 1;
        }
      }
      if (!valid(next)) return;
      span = next;
      next = spanFrom(span.end);
      const Part<Traits> begun = partOf(span, use);
      barrierWait(sharedAddress(shared) + kReadyBarrier, use & 1);
      q.load(begun);
      setWeights(begun, span, steps, StateReader<Traits::kRead>::kFactor * __shfl_sync(kAllLanes, q.factor, 0));
    }
  }
};

}  // namespace replayssm
