// Steps of plain decoding that do not flush, for the gated delta rule: how the warps of a CTA share a part, what a
// warp's area of shared memory holds, and what a warp makes of a key group before its heads: vectors, products of the
// records with them, weights.
//
// A warp is on its own: it has a key group with all or some of its heads (or rows of a head), and needs nobody else.
#pragma once

#include "../common/input.cuh"
#include "plain_gdn.cuh"

namespace replayssm {

__device__ __forceinline__ void sharedStore(uint32_t at, int x, int y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}

// How a launch deals out reads. A part is `groups` key groups of a row, or `heads` heads of one; 2^warpBits warps take a
// group, 2^splitBits of them a head.
struct GdnReads {
  int32_t sets, runs;  // parts of a row; of a group's heads
  int32_t groups, heads;
  int32_t warpBits, splitBits;
  int32_t flushOffset;  // of three words of a CTA that flushes
  int32_t rowStep, setStep;  // from a CTA's part to its next one

  // A part: number `set` of a row.
  struct Part {
    int row, set;
  };
  __device__ __forceinline__ Part first() const {
    const int part = static_cast<int>(blockIdx.x);
    return {part / sets, part % sets};
  }
  __device__ __forceinline__ Part after(const Part& at) const {
    const int set = at.set + setStep;
    return set < sets ? Part{at.row + rowStep, set} : Part{at.row + rowStep + 1, set - sets};
  }
};

// Byte offsets in a warp's area.
template <class Traits>
struct GdnArea {
  static_assert(Traits::kWarps == 8 && Traits::kHeadDim == 128 && Traits::kStateDim == 128, "32 rows a chunk");
  static constexpr int kBlockSlabs = 4096 / (16 * Traits::Read::kRowBytes);  // of a stage
  static constexpr int kCodeBytes = 4096, kScaleBytes = kBlockSlabs * 16 * Traits::Read::kScaleBytes;
  static constexpr int kStageBytes = kCodeBytes + kScaleBytes;
  static constexpr int kRowBytes = 2 * Traits::kHeadDim;  // of a correction or value
  static constexpr int kRecords = 2 * kStageBytes;
  static constexpr int kValues = kRecords + (Traits::kPlainWindow - 1) * kRowBytes;  // the token's
  static constexpr int kWeightHeads = 4;  // whose weights are made at once
  static constexpr int kWeightBytes = 3 * 64;
  static constexpr int kWeights = kValues + kRowBytes;  // fragments before
  static constexpr int kDots = kWeights + kWeightHeads * kWeightBytes;
  static constexpr int kScalars = kDots + 2 * 16 * 4;
  static constexpr int kFactors = kScalars + kWeightHeads * 16;  // of the group's vectors
  static constexpr int kShare = kFactors + 16;
  static constexpr int kPlace = kShare + 32;
  static constexpr int kBytes = roundUp(kPlace + 16, 128);
  static_assert(kWeightHeads * kWeightBytes >= 2 * 16 * 16, "room for fragments");
};

// A warp's share of a part, of a row that does not flush: heads firstHead, firstHead + 2^headBits, ... It is kept in shared
// memory and looked up where it is needed, as the product with a state wants the registers.
struct GdnShare {
  int row, group, firstHead, heads;
  int slot, origin, pending;
  float product;  // of key and query

  GdnShare() = default;
  // What the launch says of it.
  __device__ __forceinline__ GdnShare(const UpdateParams& p, const GdnReads& reads, const GdnReads::Part& part, int warp) {
    const int set = reads.runs > 1 ? part.set / reads.runs : part.set, run = reads.runs > 1 ? part.set % reads.runs : 0;
    row = part.row;
    group = set * reads.groups + (warp >> reads.warpBits);
    const int runHeads = min(reads.heads, p.headsPerGroup - run * reads.heads);
    const int first = (warp & ((1 << reads.warpBits) - 1)) >> reads.splitBits;
    const int bits = reads.warpBits - reads.splitBits;
    firstHead = group * p.headsPerGroup + run * reads.heads + first;
    heads = first < runHeads ? ((runHeads - first - 1) >> bits) + 1 : 0;
  }

  __device__ void take(int itsSlot, int itsOrigin, int itsPending) {
    slot = itsSlot;
    origin = itsOrigin;
    pending = itsPending;
    product = 0.0f;
  }

  __device__ __forceinline__ void save(char* at) const {
    reinterpret_cast<int4*>(at)[0] = make_int4(row, group, firstHead, heads);
    reinterpret_cast<int4*>(at)[1] = make_int4(slot, origin, pending, __float_as_int(product));
  }
  static __device__ __forceinline__ GdnShare saved(const char* at) {
    const int4 low = sharedWords(sharedAddress(at)), high = sharedWords(sharedAddress(at) + 16);
    GdnShare s;
    s.row = low.x;
    s.group = low.y;
    s.firstHead = low.z;
    s.heads = low.w;
    s.slot = high.x;
    s.origin = high.y;
    s.pending = high.z;
    s.product = __int_as_float(high.w);
    return s;
  }

  __device__ int ringRow(const UpdateParams& p, int record) const {
    const int r = origin + record;
    return r < p.ringRows ? r : r - p.ringRows;
  }
};

// What a warp makes of a key group before its heads.
template <class Traits>
struct GdnGroup {
  using Act = typename Traits::Act;
  using Area = GdnArea<Traits>;
  using Reader = StateReader<Traits::kRead>;
  // NVFP4: column 2c + v of a product is vector v's share of the columns that lane c holds, so that block scales
  // multiply sums; else each column with that v is the whole of it.
  static constexpr bool kShares = Traits::kRead == StateFormat::kE2m1;
  const UpdateParams& p;
  const GdnShare& share;
  char* const area;
  const int lane, headBits;
  const bool owner, headOwner;  // appends the group's key; its heads' numbers

  // Numbers of a head, of lane % 8 = r: log-decays of records 2r, 2r + 1 and of the token; beta, head scale.
  struct HeadNumbers {
    float log[2], tokenLog, beta, scale;
  };
  // The committed keys as left operands: lane (g, c) has, of records g and g + 8, columns 8c..8c+7 of every 32.
  struct Keys {
    uint4 piece[2][4];
    float factor[2];
  };

  __device__ int64_t head(int index) const { return share.firstHead + (index << headBits); }
  __device__ float* numbers(int at) const { return reinterpret_cast<float*>(area + at); }

  // Loads of the ring alone, eight lanes a head: heads first + lane / 8.
  __device__ __forceinline__ void loadLogs(HeadNumbers& n, int first) const {
    const int index = first + lane / 8, r = lane % 8;
    n = {};
    if (index >= share.heads) return;
    const float* ring = p.ringDt + share.slot * p.ringDtSlotStride + head(index) * p.ringRows;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * r + e < share.pending) n.log[e] = __ldcg(ring + share.ringRow(p, 2 * r + e));
    }
    n.scale = 1.0f;
    if constexpr (Traits::kRead == StateFormat::kE2m1) {
      n.scale = __ldcg(p.read.headScale + share.slot * p.read.headScaleSlotStride + head(index));
    }
  }
  // Those of the token, which the predecessor may have written.
  __device__ __forceinline__ void loadToken(HeadNumbers& n, int first) const {
    const int index = first + lane / 8;
    if (index >= share.heads) return;
    n.tokenLog = loadInput(static_cast<const float*>(p.dt.data) + share.row * p.dt.rowStride + head(index) * p.dt.headStride);
    n.beta = loadInput(static_cast<const float*>(p.beta.data) + share.row * p.beta.rowStride +
                       head(index) * p.beta.headStride);
  }

  __device__ __forceinline__ void loadKeys(Keys& keys) const {
    const int64_t group = share.group;
    const Act* ring = static_cast<const Act*>(p.ringKey) + share.slot * p.ringKeySlotStride +
                      group * p.ringRows * Traits::kStateDim + lane % 4 * 8;
    const float* factors = p.ringKeyFactor + share.slot * p.ringKeyFactorSlotStride + group * p.ringRows;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int record = lane / 4 + 8 * e;
      keys.factor[e] = 0.0f;
#pragma unroll
      for (int b = 0; b < 4; ++b) keys.piece[e][b] = make_uint4(0, 0, 0, 0);
      if (record >= share.pending) continue;
      const int place = share.ringRow(p, record);
      keys.factor[e] = __ldcg(factors + place);
      const uint4* row = reinterpret_cast<const uint4*>(ring + place * Traits::kStateDim);
#pragma unroll
      for (int b = 0; b < 4; ++b) keys.piece[e][b] = __ldcg(row + 4 * b);
    }
  }

  // Products of the committed keys with both vectors, with the keys' factors: 16 each, to the area.
  __device__ __forceinline__ void multiplyKeys(const Keys& keys, const uint4 (&vector)[4]) const {
    float dot[4] = {}, second[4] = {};
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint4 &x = keys.piece[0][b], &y = keys.piece[1][b];
      mmaAct<Act>(dot, {x.x, y.x, x.y, y.y}, vector[b].x, vector[b].y);
      mmaAct<Act>(second, {x.z, y.z, x.w, y.w}, vector[b].z, vector[b].w);
    }
    if (lane % 4 != 0) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      numbers(Area::kDots)[e % 2 * 16 + e / 2 * 8 + lane / 4] = (dot[e] + second[e]) * keys.factor[e / 2];
    }
  }

  // The vectors' fragments, scaled by a power of two as QueryFragments says, and factors: what products of codes are
  // multiplied by, less decays and head scale, and 1 / |k| and 1 / (|q| sqrt(N)). Appends the key.
  __device__ __forceinline__ void makeVectors(const uint4& own, const uint4& other) const {
    const VectorPiece<Traits> piece(own, other, lane);
    const int exponent = max(static_cast<int>(__float_as_uint(piece.largest) >> 23) - 127, -100);
    const float up = __uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23);
    uint32_t halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = Reader::column(i / 2, 0, i % 2 * 2), second = Reader::column(i / 2, 0, i % 2 * 2 + 1);
      const __half2 pair = __floats2half2_rn(piece.x[first] * up, piece.x[second] * up);
      halves[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    reinterpret_cast<uint4*>(area + Area::kWeights)[lane] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
    if (lane % 16 == 0) {
      const float down = __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23);
      numbers(Area::kFactors)[lane / 16] = Reader::kFactor * down * piece.factor;
      numbers(Area::kFactors)[2 + lane / 16] = piece.factor;
    }
    if (lane == 0) numbers(Area::kShare)[7] = piece.product;
    if (!owner) return;
    const int place = share.ringRow(p, share.pending);
    if (lane == 0) appendKeyFactor(p, share.slot, share.group, place, piece.factor);
    if (lane < 16) {
      Act* ring = static_cast<Act*>(p.ringKey) + share.slot * p.ringKeySlotStride +
                  (static_cast<int64_t>(share.group) * p.ringRows + place) * Traits::kStateDim;
      reinterpret_cast<uint4*>(ring)[vectorPiece<Traits>(lane)] = own;
    }
  }

  // The vectors as right operands.
  __device__ __forceinline__ void takeFragments(uint32_t (&b)[Traits::kSteps][2]) const {
    const int g = lane / 4, c = lane % 4;
    const uint4* fragments = reinterpret_cast<const uint4*>(area + Area::kWeights) + g % 2 * 16 + c * 4;
#pragma unroll
    for (int i = 0; i < Traits::kSteps / 2; ++i) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (!kShares || g / 2 == c) words = fragments[i];
      b[2 * i][0] = words.x;
      b[2 * i][1] = words.y;
      b[2 * i + 1][0] = words.z;
      b[2 * i + 1][1] = words.w;
    }
  }

  // Weights of heads first .. first + 3 as right operands, lane 8 i + 4 v + c those of the i-th head and vector v, and four
  // scalars of each: what records are multiplied by, what products with either vector are, beta. Appends the numbers.
  __device__ __forceinline__ void makeWeights(const HeadNumbers& n, int first) const {
    const int r = lane % 8, c = lane % 4, index = first + lane / 8;
    float suffix = n.log[0] + n.log[1];
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      const float other = __shfl_down_sync(kAllLanes, suffix, d, 8);
      if (r + d < 8) suffix += other;
    }
    const float total = __shfl_sync(kAllLanes, suffix, 0, 8);
    const float next = __shfl_down_sync(kAllLanes, suffix, 1, 8);
    const float after = r < 7 ? next : 0.0f;
    const float committed[2] = {expf(n.log[1] + after), expf(after)};
    const float alpha = expf(n.tokenLog) * numbers(Area::kFactors)[2 + r / 4];
    const float* dots = numbers(Area::kDots) + r / 4 * 16 + 2 * c;
    float weight[4], largest = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int record = 2 * c + e / 2 * 8 + e % 2;
      const float own = __shfl_sync(kAllLanes, committed[e % 2], c + e / 2 * 4, 8);
      weight[e] = record < share.pending ? own * alpha * dots[e / 2 * 8 + e % 2] : 0.0f;
      largest = fmaxf(largest, fabsf(weight[e]));
    }
    WeightParts<__half, 2> parts;
    const float factor = parts.template set<4>(weight, largest);
    char* to = area + Area::kWeights + lane / 8 * Area::kWeightBytes + r * 8;
#pragma unroll
    for (int i = 0; i < 3; ++i) *reinterpret_cast<uint2*>(to + 64 * i) = make_uint2(parts.part[i][0], parts.part[i][1]);
    if (r != 0 || index >= share.heads) return;
    const float decay = n.scale * expf(total + n.tokenLog);
    const float* factors = numbers(Area::kFactors);
    *reinterpret_cast<float4*>(area + Area::kScalars + lane / 8 * 16) =
        make_float4(factor, decay * factors[0], decay * factors[1], n.beta);
    if (!headOwner) return;
    const int place = share.ringRow(p, share.pending);
    p.ringDt[share.slot * p.ringDtSlotStride + head(index) * p.ringRows + place] = n.tokenLog;
    p.ringBeta[share.slot * p.ringBetaSlotStride + head(index) * p.ringRows + place] = n.beta;
  }
};

}  // namespace replayssm
