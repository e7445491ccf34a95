// Flushing steps: the CTA takes its part's heads one after the other, a warp a slab. A slab goes from the
// high-precision checkpoint through shared memory into registers; the next one's load starts there and then. It is
// folded, read out, and written to both copies from the same float32 numbers: the recurrence with stochastic rounding
// straight from registers, the read copy to nearest. For NVFP4 the warps first exchange the head's largest magnitude.
#pragma once

#include "fold.cuh"
#include "gdn.cuh"
#include "plain.cuh"

namespace replayssm {

template <class Traits>
struct HeadFlush {
  using Act = typename Traits::Act;
  using Hp = typename Traits::Recurrence;
  using Lp = typename Traits::Read;
  using HpCodec = SlabCodec<Traits::kRecurrence>;
  const Part<Traits>& part;
  const uint32_t full;  // barrier of this warp's slab

  struct Item {
    int index, slab;
  };

  __device__ bool valid(const Item& item) const { return item.index < part.heads && item.slab < Traits::kSlabs; }

  __device__ Item next(Item item) const {
    if constexpr (Traits::kWholeHead) return {item.index + 1, part.warp};
    item.slab += Traits::kWarps;
    return item.slab < Traits::kSlabs ? item : Item{item.index + 1, part.warp};
  }

  // Of the item's place in this warp's sequence.
  __device__ uint32_t parityOf(const Item& item) const {
    if constexpr (Traits::kWholeHead) return item.index & 1;
    const int slabs = (Traits::kSlabs - part.warp + Traits::kWarps - 1) / Traits::kWarps;
    return (item.index * slabs + item.slab / Traits::kWarps) & 1;
  }

  // What a flush folds: x, or for GDN raw values, from which it derives the corrections anew.
  __device__ const Act* recordInputs(int head) const {
    if constexpr (Traits::kGdn) return part.ringInputs(head);
    return part.ringValues(head);
  }

  // Row of the slab's first state row among all rows of the slot.
  __device__ int64_t stateRow(const Item& item) const {
    return static_cast<int64_t>(part.firstHead + item.index) * Traits::kHeadDim + item.slab * 16;
  }
  __device__ char* state(const CheckpointCopy& copy, const Item& item, int rowBytes) const {
    return static_cast<char*>(copy.data) + part.slot * copy.slotBytes + stateRow(item) * rowBytes;
  }
  __device__ char* scale(const CheckpointCopy& copy, const Item& item, int rowBytes) const {
    return static_cast<char*>(copy.scale) + part.slot * copy.scaleSlotBytes + stateRow(item) * rowBytes;
  }

  // The records of two slabs in turn: one is loaded while the other is in use.
  __device__ int valueOffset(const Item& item) const {
    return part.layout.slabValueOffset + static_cast<int>(parityOf(item)) * part.layout.slabValueBytes;
  }

  __device__ void load(const Item& item) const {
    const NarrowLayout& layout = part.layout;
    const uint32_t target = sharedAddress(part.own());
    if (part.lane == 0) {
      barrierExpect(full, 16 * (Hp::kRowBytes + Hp::kScaleBytes));
      bulkLoad(target, state(part.p.recurrence, item, Hp::kRowBytes), 16 * Hp::kRowBytes, full);
      if constexpr (Hp::kScaleBytes > 0) {
        bulkLoad(target + layout.slabScaleOffset, scale(part.p.recurrence, item, Hp::kScaleBytes),
                 16 * Hp::kScaleBytes, full);
      }
      const Item after = next(item);
      if (valid(after)) bulkPrefetch(state(part.p.recurrence, after, Hp::kRowBytes), 16 * Hp::kRowBytes);
    }
    const int head = part.firstHead + item.index;
    part.template loadRows<2, 32>(target + valueOffset(item), Traits::kSlabValuePitch,
                                  recordInputs(head) + item.slab * 16, Traits::kHeadDim,
                                  part.tokenValues(head) + item.slab * 16, part.p.value.tokenStride, part.lane);
    __syncwarp();
    loadsArrive(full);
  }

  // Largest finite magnitude of the head, of which every warp holds one slab.
  __device__ float headLargest(const Slab& s, int index) const {
    float largest = 0.0f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest = fmaxf(largest, largestFinite(s[b][half], largestBits(s[b][half])));
      }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, d));
    // Heads take turns with two rows: a warp is at most one head ahead.
    float* row = reinterpret_cast<float*>(part.shared + part.layout.amaxOffset) + index % 2 * 16;
    if (part.lane == 0) row[part.warp] = largest;
    asm volatile("bar.sync 1, %0;" ::"n"(32 * Traits::kSlabs) : "memory");
#pragma unroll
    for (int i = 0; i < Traits::kSlabs; ++i) largest = fmaxf(largest, row[i]);
    return largest;
  }

  // Both copies, from the same float32 numbers.
  __device__ void store(Slab& s, const Item& item, const StateRandom& random, int lane) const {
    const NarrowLayout& layout = part.layout;
    char* own = part.own();
    float headScale = 1.0f;
    if constexpr (Traits::kWholeHead) {
      headScale = nvfp4HeadScale(headLargest(s, item.index));
      if (part.warp == 0 && part.lane == 0) {
        part.p.read.headScale[part.slot * part.p.read.headScaleSlotStride + part.firstHead + item.index] = headScale;
      }
    }
    const typename HpCodec::Encoder hp(s, state(part.p.recurrence, item, Hp::kRowBytes),
                                       scale(part.p.recurrence, item, Hp::kScaleBytes), 1.0f, lane);
    if constexpr (Traits::kShared) {
#pragma unroll 1
      for (int b = 0; b < 4; ++b, rotate(s)) hp.stochastic(s[0], b, random, item.slab * 16);
    } else {
      if (part.lane == 0) bulkWaitRead();  // of the last slab's codes
      __syncwarp();
      const typename SlabCodec<Traits::kRead>::Encoder lp(s, own + layout.codeOffset, own + layout.codeScaleOffset,
                                                          headScale, lane);
#pragma unroll 1
      for (int b = 0; b < 4; ++b, rotate(s)) {
        hp.stochastic(s[0], b, random, item.slab * 16);
        lp.nearest(s[0], b);
      }
      asyncProxyFence();
      __syncwarp();
      if (part.lane == 0) {
        const uint32_t source = sharedAddress(own);
        bulkStore(state(part.p.read, item, Lp::kRowBytes), source + layout.codeOffset, 16 * Lp::kRowBytes);
        if constexpr (Lp::kScaleBytes > 0) {
          bulkStore(scale(part.p.read, item, Lp::kScaleBytes), source + layout.codeScaleOffset, 16 * Lp::kScaleBytes);
        }
        bulkCommit();
      }
    }
  }

  // Folds and computes the outputs: one token, up to 16 records.
  __device__ void foldPlain(float (&sum)[4], Slab& s, const Item& item, const char* values, int lane) const {
    using A = Activation<Act>;
    const float* at = plainWeights(part, item.index);
    foldTile<Traits>(s, part.shared + part.layout.keyOffset, values, PlainFolds{at}, at[16], 0, part.pending, lane);
    float recalled[2];
    readSlabOnce<Traits>(recalled, s, part.queries(), lane);
    const char* value = values + part.pending * Traits::kSlabValuePitch + lane / 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16 * half));
      sum[2 * half] = fmaf(at[17], recalled[half], at[18] * x);
    }
  }

  // The same for any number of tokens and records.
  __device__ void foldAny(float (&sum)[1][4], Slab& s, const Item& item, const char* values, int lane) const {
    const int pending = part.pending, tokens = part.tokens;
    const float* scalars = part.scalars();
    HeadWeights weights;
    weights.load(part.dt(item.index), scalars[item.index], pending, tokens, lane);
    foldSlab<Traits>(s, part.shared + part.layout.keyOffset, values, weights.decay, pending, lane);
    readSlab<Traits>(sum[0], s, part.vectorRow(lane / 4), lane / 4 < tokens, lane);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float factor = expf(__shfl_sync(kAllLanes, weights.decay.prefix, 2 * (lane % 4) + e));
      sum[0][e] *= factor;
      sum[0][2 + e] *= factor;
    }
    weights.skip = part.p.skip != nullptr ? scalars[kMaxPartHeads + item.index] : 0.0f;
    float weight[4];
    recordWeights<Traits, true>(weight, part.dots()[lane], weights, pending, pending, tokens, lane);
    addRecords<Act, 1, Traits::kSlabValuePitch>(
        sum, sharedAddress(values) + pending * Traits::kSlabValuePitch, weight, tokens, lane);
  }

  __device__ void finish(const Item& item) const {
    const NarrowLayout& layout = part.layout;
    // Opaque, so that what follows from the lane is made for each head and not kept beside the slab.
    int lane = part.lane;
    asm volatile("" : "+r"(lane));
    const int head = part.firstHead + item.index;
    const char* values = part.own() + valueOffset(item);
    Slab s;
    HpCodec::decode(s, part.own(), part.own() + layout.slabScaleOffset, lane);
    asyncProxyFence();  // the reads have happened before the next slab may arrive in their place
    __syncwarp();
    if (valid(next(item))) load(next(item));
    float sum[1][4] = {};
    if constexpr (Traits::kGdn) {
      flushGdn(sum[0], s, part, item.index, item.slab, values, lane);
    } else if constexpr (Traits::kPlain) {
      foldPlain(sum[0], s, item, values, lane);
    } else {
      foldAny(sum, s, item, values, lane);
    }
    part.writeOutput(head, item.slab, sum[0]);
    part.appendValues(head, values, Traits::kSlabValuePitch, item.slab * 16, 2);
    const UpdateParams& p = part.p;
    StateRandom random{};
    if constexpr (Traits::kRecurrence != StateFormat::kFloat32) {
      random = {static_cast<uint64_t>(__ldg(p.seed + part.slot)),
                static_cast<uint32_t>(p.layer) << 16 | static_cast<uint32_t>(p.headOffset + head),
                static_cast<uint32_t>(__ldg(p.position + part.slot))};
    }
    store(s, item, random, lane);
  }

  // Slabs beyond a head's go to nobody: with NVFP4 reads some warps have none.
  __device__ void start() const {
    const Item first{0, part.warp};
    if (valid(first)) load(first);
  }

  __device__ void run() const {
#pragma unroll 1
    for (Item item{0, part.warp}; valid(item);) {
      // Opaque, so that addresses are made for each item and not kept in registers beside the slab.
      Part<Traits> own = part;
      asm volatile("" : "+r"(own.slot), "+r"(own.firstHead), "+r"(own.origin), "+r"(own.row));
      asm volatile("" : "+r"(own.tokens), "+r"(own.pending));
      const HeadFlush<Traits> flush{own, full};
      barrierWait(full, parityOf(item));
      flush.finish(item);
      item = next(item);
    }
    if (part.lane == 0) bulkWait();
  }
};

}  // namespace replayssm
