// Steps of plain decoding that do not flush, for the gated delta rule: a warp takes whole heads, or a share of one
// where a part has fewer heads than warps, in chunks of 32 state rows through private stages. What a head needs besides its
// rows is made once, and kept in registers.
#pragma once

#include "plain_gdn.cuh"

namespace replayssm {

template <class Traits>
struct PlainGdnStream {
  using Act = typename Traits::Act;
  using Reader = StateReader<Traits::kRead>;
  static_assert(Traits::kWarps == 8 && Traits::kItems == 4 && Traits::kItemSlabs == 2, "chunks of 32 rows");
  const Part<Traits>& part;
  const uint32_t barriers;  // of this warp's stages

  struct Chunk {
    int index, chunk;  // the part's head, which 32 rows of it
    bool first;        // of this warp's chunks of the head
  };

  struct Head {
    uint32_t b[Traits::kSteps][2];
    WeightParts<__half, 2> records;
    float recordFactor;
    float decay[2];  // what the product of codes and vectors is multiplied by
    float beta, product;
  };

  __device__ char* stage(int s) const { return part.own() + s * part.layout.stageBytes; }

  // The warp's chunk number n: two to the power of `bits` warps share a head.
  __device__ Chunk chunk(int n) const {
    const int bits = part.heads <= 2 ? 2 : part.heads <= 4 ? 1 : 0;
    const int own = n & ((4 >> bits) - 1);
    return {(part.warp >> bits) + (n >> (2 - bits) << (3 - bits)), (part.warp & ((1 << bits) - 1)) + (own << bits),
            own == 0};
  }
  __device__ bool valid(const Chunk& at) const { return at.index < part.heads; }

  // Where the lane's piece of record lane / 4 + `after` lies in a head's ring.
  __device__ int recordPlace(int after) const {
    return part.ringRow(part.lane / 4 + after) * Traits::kHeadDim + part.lane % 4 * 8;
  }

  // Starts all loads of a chunk.
  __device__ void load(const Chunk& at, int s) const {
    const uint32_t target = sharedAddress(stage(s)), full = barriers + 8 * s;
    const int head = part.firstHead + at.index, lane = part.lane;
    if (lane == 0) {
      const CheckpointCopy& copy = part.p.read;
      const int64_t place = static_cast<int64_t>(head) * Traits::kItems + at.chunk;
      barrierExpect(full, Traits::kStateBytes + Traits::kScaleBytes);
      bulkLoad(target, static_cast<const char*>(copy.data) + part.slot * copy.slotBytes + place * Traits::kStateBytes,
               Traits::kStateBytes, full);
      if constexpr (Traits::kScaleBytes > 0) {
        bulkLoad(target + Traits::kStateBytes,
                 static_cast<const char*>(copy.scale) + part.slot * copy.scaleSlotBytes + place * Traits::kScaleBytes,
                 Traits::kScaleBytes, full);
      }
    }
    const Act* ring = part.ringValues(head) + at.chunk * 32;
    const uint32_t values = target + part.layout.valueOffset + lane / 4 * Traits::kValuePitch + lane % 4 * 16;
    if (lane / 4 < part.pending) pieceLoad(values, ring + recordPlace(0));
    if (lane / 4 + 8 < part.pending) pieceLoad(values + 8 * Traits::kValuePitch, ring + recordPlace(8));
    __syncwarp();
    loadsArrive(full);
  }

  // Column 2c' + v of a product is vector v's share of the columns that lane c' holds.
  __device__ void setHead(Head& h, int index) const {
    const int lane = part.lane, g = lane / 4, c = lane % 4, pending = part.pending;
    const Part<Traits> group = part.inGroup(part.groupOf(index));
#pragma unroll
    for (int i = 0; i < Traits::kSteps / 2; ++i) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (g / 2 == c) words = group.fragments()[g % 2 * 16 + c * 4 + i];
      h.b[2 * i][0] = words.x;
      h.b[2 * i][1] = words.y;
      h.b[2 * i + 1][0] = words.z;
      h.b[2 * i + 1][1] = words.w;
    }
    const float* norms = group.norms();
    const float* log = part.dt(index);
    h.beta = part.beta(index)[pending];
    h.product = norms[2];
    const int record = lane % 16;
    float suffix = record < pending ? log[record] : 0.0f;
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
      const float other = __shfl_down_sync(kAllLanes, suffix, d, 16);
      if (record + d < 16) suffix += other;
    }
    float scale = Reader::kFactor;
    if constexpr (Traits::kRead == StateFormat::kE2m1) scale *= part.scalars()[2 * kMaxPartHeads + index];
    scale *= expf(__shfl_sync(kAllLanes, suffix, 0) + log[pending]);
#pragma unroll
    for (int v = 0; v < 2; ++v) h.decay[v] = scale * group.fragmentFactors()[v] * norms[v];
    if (pending == 0) return;
    const float next = __shfl_down_sync(kAllLanes, suffix, 1, 16);
    const float committed = record < pending ? group.factors()[record] * expf(record < 15 ? next : 0.0f) : 0.0f;
    const float alpha = g < 2 ? expf(log[pending]) * norms[g % 2] : 0.0f;
    const float4 dot = group.dots()[lane];
    const float dots[4] = {dot.x, dot.y, dot.z, dot.w};
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      weight[e] = __shfl_sync(kAllLanes, committed, 2 * c + e % 2 + e / 2 * 8) * alpha * dots[e];
    }
    h.recordFactor = h.records.set(weight);
  }

  // sum = state and committed records times the vectors, in shares.
  __device__ void multiply(float (&sum)[2][4], const char* at, const Head& h) const {
    const int lane = part.lane;
    const char* scales = at + Traits::kStateBytes;
    const int record = min(lane % 8 + lane / 16 * 8, part.pending - 1);
    const uint32_t values =
        sharedAddress(at + part.layout.valueOffset) + record * Traits::kValuePitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      StateFragments a;
      const char* slab = at + m * 16 * Traits::Read::kRowBytes;
      const char* slabScales = scales + m * 16 * Traits::Read::kScaleBytes;
      float low[4] = {}, high[4] = {};  // NVFP4: blocks 2c, and 2c + 1
      if constexpr (Traits::kRead == StateFormat::kE2m1) {
        Reader::loadCodes(a, slab, lane);
      } else {
        Reader::load(a, slab, slabScales, lane);
      }
#pragma unroll
      for (int s = 0; s < Traits::kSteps / 2; ++s) {
        mmaAct<__half>(low, a[s], h.b[s][0], h.b[s][1]);
        mmaAct<__half>(high, a[s + 4], h.b[s + 4][0], h.b[s + 4][1]);
      }
      if constexpr (Traits::kRead == StateFormat::kE2m1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t both = Reader::blockScales(slabScales, lane / 4 + 8 * half, lane);
          const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&both));
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            sum[m][2 * half + v] = fmaf(low[2 * half + v], scale.x, high[2 * half + v] * scale.y);
          }
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][e] = low[e] + high[e];
        Reader::scale(sum[m], slabScales, lane);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][e] *= h.decay[e % 2];
      if (part.pending > 0) {
        uint32_t x[4];
        loadTransposed(x, values + 32 * m);
        float recalled[4] = {};
#pragma unroll
        for (int i = 0; i < 3; ++i) mmaAct<__half>(recalled, x, h.records.part[i][0], h.records.part[i][1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][e] = fmaf(h.recordFactor, recalled[e], sum[m][e]);
      }
    }
  }

  // The warp's first loads; they may be under way before the part's shared data is.
  __device__ void start() const {
    for (int s = 0; s < part.layout.stages; ++s) {
      const Chunk at = chunk(s);
      if (valid(at)) load(at, s);
    }
  }

  __device__ void run() const {
    const int lane = part.lane, row = lane / 4 + 8 * (lane % 2) + 16 * (lane / 2 % 2);
    Head head{};
    TokenPlace<Traits> token{};  // in the head's first chunk
    int s = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const Chunk at = chunk(n);
      if (!valid(at)) break;
      if (at.first) {
        setHead(head, at.index);
        token = TokenPlace<Traits>(part, part.firstHead + at.index, row);
      }
      const int offset = at.chunk * 32;
      const uint16_t value = __ldg(token.value + offset);
      barrierWait(barriers + 8 * s, parity);
      float sum[2][4], recalled[2];
      multiply(sum, stage(s), head);
      dealRows(recalled, sum, lane);
      __syncwarp();
      const Chunk next = chunk(n + part.layout.stages);
      if (valid(next)) load(next, s);
      token.out[offset] = Activation<Act>::fromFloat(finishRow<Traits>(
          recalled, value, head.beta, head.product, token.correction + offset, token.raw + offset));
      if (++s == part.layout.stages) {
        s = 0;
        parity ^= 1;
      }
    }
  }
};

}  // namespace replayssm
