// Steps that do not flush: each warp streams its own items through private stages and multiplies the read copy's codes
// with the queries on tensor cores, in float16, where codes are exact.
#pragma once

#include "gdn.cuh"
#include "plain.cuh"

namespace replayssm {

// The queries as right operands: lane (g, c) holds vector g's columns of each step, scaled by a power of two so that
// the largest is in float16's top binade; what bfloat16 has below float16's range is less than 2^-32 of the largest.
// One warp makes them for the part.
template <class Traits>
struct QueryFragments {
  uint32_t b[Traits::kSteps][2];
  float factor;  // what the products are multiplied by

  static __device__ uint4* place(const Part<Traits>& part) {
    return part.fragments() + part.lane * (Traits::kSteps / 2);
  }

  static __device__ void make(const Part<Traits>& part) {
    using A = Activation<typename Traits::Act>;
    const int vector = part.lane / 4, c = part.lane % 4;
    const char* row = part.vectorRow(min(vector, part.vectors() - 1));
    float value[Traits::kSteps][4];
    float largest = 0.0f;
#pragma unroll
    for (int s = 0; s < Traits::kSteps; ++s) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        value[s][e] = A::toFloat(
            *reinterpret_cast<const uint16_t*>(row + StateReader<Traits::kRead>::column(s, c, e) * 2));
        largest = fmaxf(largest, fabsf(value[s][e]));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
    const float up = __uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23);
    if (vector >= part.vectors()) return;
    uint32_t* to = reinterpret_cast<uint32_t*>(place(part));
#pragma unroll
    for (int i = 0; i < 2 * Traits::kSteps; ++i) {
      const __half2 both = __floats2half2_rn(value[i / 2][i % 2 * 2] * up, value[i / 2][i % 2 * 2 + 1] * up);
      to[i] = *reinterpret_cast<const uint32_t*>(&both);
    }
    if (c == 0) part.fragmentFactors()[vector] = __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23);
  }

  __device__ void load(const Part<Traits>& part) {
    const int g = part.lane / 4;
    const bool real = Traits::kBlockColumns ? g / 2 == part.lane % 4 : g < part.vectors();
    const uint4* from = Traits::kBlockColumns ? place(part) - g * 4 * (Traits::kSteps / 2) : place(part);
    factor = g < part.vectors() ? part.fragmentFactors()[g] : 0.0f;
#pragma unroll
    for (int s = 0; s < Traits::kSteps; s += 2) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (real && (!Traits::kBlockColumns || s / 4 == g % 2)) words = from[s / 2];
      b[s][0] = words.x;
      b[s][1] = words.y;
      b[s + 1][0] = words.z;
      b[s + 1][1] = words.w;
    }
  }
};

// sum[m] = S q for the rows of slab m, less the queries' factor: a column for each token, or (kBlockColumns) for each
// block of the only one.
template <class Traits>
__device__ __forceinline__ void readState(float (&sum)[Traits::kItemSlabs][4], const char* at,
                                          const QueryFragments<Traits>& q, int lane) {
  using Reader = StateReader<Traits::kRead>;
  const char* scales = at + Traits::kStateBytes;
#pragma unroll
  for (int m = 0; m < Traits::kItemSlabs; ++m) {
    StateFragments a;
    const char* slab = at + m * 16 * Traits::Read::kRowBytes;
    const char* slabScales = scales + m * 16 * Traits::Read::kScaleBytes;
    if constexpr (Traits::kBlockColumns) {
      Reader::loadCodes(a, slab, lane);
    } else {
      Reader::load(a, slab, slabScales, lane);
    }
    float odd[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[m][e] = 0.0f;
#pragma unroll
    for (int s = 0; s < Traits::kSteps; s += 2) {
      mmaAct<__half>(sum[m], a[s], q.b[s][0], q.b[s][1]);
      mmaAct<__half>(odd, a[s + 1], q.b[s + 1][0], q.b[s + 1][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[m][e] += odd[e];
    if constexpr (Traits::kBlockColumns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t both = Reader::blockScales(slabScales, lane / 4 + 8 * half, lane);
        const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&both));
        sum[m][2 * half] *= scale.x;
        sum[m][2 * half + 1] *= scale.y;
      }
    } else {
      Reader::scale(sum[m], slabScales, lane);
    }
  }
}

template <class Traits>
struct HeadStream {
  using Act = typename Traits::Act;
  using Reader = StateReader<Traits::kRead>;
  const Part<Traits>& part;
  const uint32_t barriers;  // of this warp's stages

  __device__ char* stage(int s) const { return part.own() + s * part.layout.stageBytes; }

  __device__ bool valid(int item) const { return item < part.heads * Traits::kItems; }
  __device__ int64_t place(int item) const {
    return static_cast<int64_t>(part.firstHead + item / Traits::kItems) * Traits::kItems + item % Traits::kItems;
  }
  __device__ const char* codes(int item) const {
    return static_cast<const char*>(part.p.read.data) + part.slot * part.p.read.slotBytes +
           place(item) * Traits::kStateBytes;
  }
  __device__ const char* scales(int item) const {
    return static_cast<const char*>(part.p.read.scale) + part.slot * part.p.read.scaleSlotBytes +
           place(item) * Traits::kScaleBytes;
  }

  // Starts all loads of an item.
  __device__ void load(int item, int s) const {
    const uint32_t target = sharedAddress(stage(s)), full = barriers + 8 * s;
    if (part.lane == 0) {
      barrierExpect(full, Traits::kStateBytes + Traits::kScaleBytes);
      bulkLoad(target, codes(item), Traits::kStateBytes, full);
      if constexpr (Traits::kScaleBytes > 0) {
        bulkLoad(target + Traits::kStateBytes, scales(item), Traits::kScaleBytes, full);
      }
    }
    const int head = part.firstHead + item / Traits::kItems, column = item % Traits::kItems * Traits::kItemSlabs * 16;
    part.template loadRows<Traits::kItemSlabs * 2, 32>(target + part.layout.valueOffset, Traits::kValuePitch,
                                                       part.ringValues(head) + column, Traits::kHeadDim,
                                                       part.tokenValues(head) + column, part.p.value.tokenStride,
                                                       part.lane);
    __syncwarp();
    loadsArrive(full);
  }

  __device__ void finish(int item, const char* at, const QueryFragments<Traits>& q) const {
    const int index = item / Traits::kItems, firstSlab = item % Traits::kItems * Traits::kItemSlabs;
    const int head = part.firstHead + index;
    float sum[Traits::kItemSlabs][4];
    readState(sum, at, q, part.lane);
    const char* values = at + part.layout.valueOffset;
    if constexpr (Traits::kGdn) {
      float scale = Reader::kFactor;
      if constexpr (Traits::kRead == StateFormat::kE2m1) scale *= part.scalars()[2 * kMaxPartHeads + index];
      streamGdn(sum, part, index, firstSlab, values, scale, q.factor);
    } else {
      addAllRecords(sum, index, sharedAddress(values), q.factor);
    }
#pragma unroll
    for (int m = 0; m < Traits::kItemSlabs; ++m) part.writeOutput(head, firstSlab + m, sum[m]);
    part.appendValues(head, values, Traits::kValuePitch, firstSlab * 16, Traits::kItemSlabs * 2);
  }

  // sum <- decayed sum + records, any number of tokens and records.
  __device__ void addAllRecords(float (&sum)[Traits::kItemSlabs][4], int index, uint32_t values,
                                float queryFactor) const {
    const int lane = part.lane;
    const float* scalars = part.scalars();
    HeadWeights weights;
    weights.load(part.dt(index), scalars[index], part.pending, part.tokens, lane);
    weights.skip = part.p.skip != nullptr ? scalars[kMaxPartHeads + index] : 0.0f;
    float scale = Reader::kFactor;
    if constexpr (Traits::kRead == StateFormat::kE2m1) scale *= scalars[2 * kMaxPartHeads + index];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = 2 * (lane % 4) + e;
      const float factor = scale * __shfl_sync(kAllLanes, queryFactor, token * 4) *
                           expf(weights.decay.total + __shfl_sync(kAllLanes, weights.decay.prefix, token));
#pragma unroll
      for (int m = 0; m < Traits::kItemSlabs; ++m) {
        sum[m][e] *= factor;
        sum[m][2 + e] *= factor;
      }
    }
    const int total = part.pending + part.tokens;
#pragma unroll 1
    for (int first = 0; first < total; first += 16) {
      float weight[4];
      recordWeights<Traits, false>(weight, part.dots()[2 * first + lane], weights, first, part.pending, part.tokens,
                                   lane);
      addRecords<Act, Traits::kItemSlabs, Traits::kValuePitch, true>(
          sum, values + first * Traits::kValuePitch, weight, total - first, lane, first - part.pending);
    }
  }

  // The warp's first loads; they may be under way before the part's shared data is.
  __device__ void start() const {
    for (int s = 0; s < part.layout.stages; ++s) {
      const int item = part.warp + s * Traits::kWarps;
      if (valid(item)) load(item, s);
    }
  }

  __device__ void run() const {
    QueryFragments<Traits> q;
    q.load(part);
    int s = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int item = part.warp; valid(item); item += Traits::kWarps) {
      barrierWait(barriers + 8 * s, parity);
      finish(item, stage(s), q);
      __syncwarp();
      const int next = item + part.layout.stages * Traits::kWarps;
      if (valid(next)) load(next, s);
      if (++s == part.layout.stages) {
        s = 0;
        parity ^= 1;
      }
    }
  }
};

}  // namespace replayssm
