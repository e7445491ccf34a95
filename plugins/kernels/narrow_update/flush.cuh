// Flushing steps: the CTA takes its part's heads one after the other, a warp a slab. A slab goes from the
// high-precision checkpoint through shared memory into registers, is folded, read out and written back, with stochastic
// rounding; while the next one is loaded, the read copy is written to nearest. For NVFP4 the warps first exchange the
// head's largest magnitude.
#pragma once

#include "fold.cuh"
#include "gdn.cuh"
#include "plain.cuh"
#include "slab_floats.cuh"
#include "slab_scaled.cuh"

namespace replayssm {

template <class Traits>
struct HeadFlush {
  using Act = typename Traits::Act;
  using Hp = typename Traits::Recurrence;
  using Lp = typename Traits::Read;
  using HpCodec = SlabCodec<Traits::kRecurrence, Traits::kExchanged>;
  using LpCodec = SlabCodec<Traits::kRead, Traits::kExchanged>;
  const Part<Traits>& part;
  const uint32_t full;  // barrier of this warp's slab

  // A float16 read copy goes to memory by way of the slab's place as a recurrence does, but for one in FP8.
  static constexpr bool kStagedRead = !Traits::kShared && Traits::kRead == StateFormat::kFloat16;
  static constexpr bool kStagedRecurrence = Traits::kRecurrence != StateFormat::kE4m3;
  // The next slab's lines go to the L2 ahead, but for NVFP4, whose long way to its codes hides the load. There it is a
  // loss (758 us instead of 624): lines read long before they are written leave the L2 in between.
  static constexpr bool kPrefetches = Traits::kRead != StateFormat::kE2m1;
  static constexpr bool kOneSlab = Traits::kWarps >= Traits::kSlabs;  // of a head, at most, is a warp's

  struct Item {
    int index, slab;
  };

  __device__ bool valid(const Item& item) const { return item.index < part.heads && item.slab < Traits::kSlabs; }

  __device__ Item next(Item item) const {
    if constexpr (kOneSlab) return {item.index + 1, part.warp};
    item.slab += Traits::kWarps;
    return item.slab < Traits::kSlabs ? item : Item{item.index + 1, part.warp};
  }

  // Of the item's place in this warp's sequence.
  __device__ uint32_t parityOf(const Item& item) const {
    if constexpr (kOneSlab) return item.index & 1;
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

  __device__ const char* values() const { return part.own() + part.layout.slabValueOffset; }

  __device__ void load(const Item& item) const {
    const NarrowLayout& layout = part.layout;
    const uint32_t target = sharedAddress(part.own());
    if (part.lane == 0) {
      barrierExpect(full, 16 * (Hp::kRowBytes + Hp::kScaleBytes));
      bulkLoadAgain(target, state(part.p.recurrence, item, Hp::kRowBytes), 16 * Hp::kRowBytes, full);
      if constexpr (Hp::kScaleBytes > 0) {
        bulkLoad(target + layout.slabScaleOffset, scale(part.p.recurrence, item, Hp::kScaleBytes),
                 16 * Hp::kScaleBytes, full);
      }
      const Item after = next(item);
      if (kPrefetches && valid(after)) {
        bulkPrefetch(state(part.p.recurrence, after, Hp::kRowBytes), 16 * Hp::kRowBytes);
      }
    }
    const int head = part.firstHead + item.index;
    part.template loadRows<2, 32>(target + layout.slabValueOffset, Traits::kSlabValuePitch,
                                  recordInputs(head) + item.slab * 16, Traits::kHeadDim,
                                  part.tokenValues(head) + item.slab * 16, part.p.value.tokenStride, part.lane);
    __syncwarp();
    loadsArrive(full);
  }

  // Largest finite magnitude of the head, of which every warp holds one slab.
  __device__ float headLargest(const SlabMaxima& maxima, int index) const {
    // Heads take turns with two rows: a warp is at most one head ahead. Magnitudes are in the order of their bits.
    uint32_t* row = reinterpret_cast<uint32_t*>(part.shared + part.layout.amaxOffset) + index % 2 * 16;
    const uint32_t own = __reduce_max_sync(kAllLanes, __float_as_uint(maxima.all()));
    if (part.lane == 0) row[part.warp] = own;
    asm volatile("bar.sync 1, %0;" ::"n"(32 * Traits::kSlabs) : "memory");
    return __uint_as_float(__reduce_max_sync(kAllLanes, row[part.lane % Traits::kSlabs]));
  }

  // Both copies are written from the same float32 numbers.
  template <class Maxima>
  __device__ void storeRecurrence(const Slab& s, const Maxima& maxima, const Item& item,
                                  const StateRandom& random) const {
    const typename HpCodec::Encoder hp(maxima, part.own(), state(part.p.recurrence, item, Hp::kRowBytes),
                                       scale(part.p.recurrence, item, Hp::kScaleBytes), 1.0f, part.lane);
#pragma unroll
    for (int run = 0; run < 4; ++run) hp.stochastic(s, maxima, run / 2, run % 2, random, item.slab * 16);
    hp.finish();
  }

  __device__ void storeRead(const Slab& s, const SlabMaxima& maxima, const Item& item) const {
    float headScale = 1.0f;
    if constexpr (Traits::kWholeHead) {
      headScale = nvfp4HeadScale(headLargest(maxima, item.index));
      if (part.warp == 0 && part.lane == 0) {
        part.p.read.headScale[part.slot * part.p.read.headScaleSlotStride + part.firstHead + item.index] = headScale;
      }
    }
    const typename LpCodec::Encoder lp(maxima, part.own(), state(part.p.read, item, Lp::kRowBytes),
                                       scale(part.p.read, item, Lp::kScaleBytes), headScale, part.lane);
#pragma unroll
    for (int run = 0; run < 4; ++run) lp.nearest(s, maxima, run / 2, run % 2);
    lp.finish();
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

  // The gated delta rule's for one token. Each step looks up anew where it is: nothing but the slab is kept over one.
  __device__ void foldPlainGdn(Slab& s) const {
    float recall[2][4], weighted[4][2];
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      if constexpr (Traits::kRecallsCodes) {
        const int group = now.groupOf(item.index), number = now.lane / 4;
        recallCodes<Traits, HpCodec>(recall, now.own(), {now.keyHalf(group, number), now.keyHalf(group, number + 8)},
                                     now.lane);
      } else {
        HpCodec::decode(s, now.own(), nullptr, now.lane);
        recallSlab(recall, s, now);
      }
    }
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      const char* scales = now.own() + now.layout.slabScaleOffset;
      const float rowScales[2] = {HpCodec::rowScale(scales, 0, now.lane), HpCodec::rowScale(scales, 1, now.lane)};
      solveSlab<Traits>(weighted, recall, rowScales, {now.solves(item.index)}, HeadFlush{now, full}.values(),
                        now.pending, now.lane);
    }
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      if constexpr (Traits::kRecallsCodes) {
        HpCodec::decode(s, now.own(), now.own() + now.layout.slabScaleOffset, now.lane);
      }
      foldFragments<Traits>(s, now.keys(), weighted, *HeadSolve{now.solves(item.index)}.total(), 0, now.pending,
                            now.lane);
    }
    const Item item = current(part);
    const Part<Traits> now = part.saved(item.index);
    finishToken(s, now, item.index, item.slab, HeadFlush{now, full}.values());
  }

  // The same for any number of tokens and records.
  __device__ void foldAny(float (&sum)[1][4], Slab& s, const Item& item, const char* values, int lane) const {
    const int pending = part.pending, tokens = part.tokens;
    const float* scalars = part.scalars();
    HeadWeights weights;
    weights.load(part.dt(item.index), scalars[item.index], pending, tokens, lane);
    foldSlab<Traits>(s, part.shared + part.layout.keyOffset, values, weights.decay, pending, lane);
    readSlab<Traits, 1>(sum, s, {part.vectorRow(lane / 4)}, {lane / 4 < tokens}, lane);
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
    const int lane = part.lane;
    const int head = part.firstHead + item.index;
    Slab s;
    if constexpr (!Traits::kPlainGdn) HpCodec::decode(s, part.own(), part.own() + layout.slabScaleOffset, lane);
    if constexpr (Traits::kPlainGdn) {
      foldPlainGdn(s);
    } else {
      float sum[1][4] = {};
      const char* values = this->values();
      if constexpr (Traits::kGdn) {
        flushGdn(sum[0], s, part, item.index, item.slab, values, lane);
      } else if constexpr (Traits::kPlain) {
        foldPlain(sum[0], s, item, values, lane);
      } else {
        foldAny(sum, s, item, values, lane);
      }
      part.writeOutput(head, item.slab, sum[0]);
      part.appendValues(head, values, Traits::kSlabValuePitch, item.slab * 16, 2);
    }
    const Item again = current(part);
    const Part<Traits> after = part.saved(again.index);
    HeadFlush<Traits>{after, full}.storeBoth(s, again);
  }

  __device__ void loadNext(const Item& item) const {
    asyncProxyFence();  // the reads have happened before the next slab may arrive in their place
    __syncwarp();
    if (valid(next(item))) load(next(item));
  }

  // What goes by way of the slab's place comes before the load of the next one.
  __device__ void storeBoth(const Slab& s, const Item& item) const {
    const UpdateParams& p = part.p;
    if constexpr (!kStagedRecurrence && !kStagedRead) loadNext(item);
    StateRandom random{};
    if constexpr (Traits::kRecurrence != StateFormat::kFloat32) {
      random = {static_cast<uint64_t>(__ldg(p.seed + part.slot)),
                static_cast<uint32_t>(p.layer) << 16 |
                    static_cast<uint32_t>(p.headOffset + part.firstHead + item.index),
                static_cast<uint32_t>(__ldg(p.position + part.slot))};
    }
    constexpr bool kPieces = Traits::kShared && Traits::kRecurrence == StateFormat::kFloat16;
    const std::conditional_t<kPieces, PieceMaxima, SlabMaxima> maxima(s);
    storeRecurrence(s, maxima, item, random);
    if constexpr (kStagedRead) storeRead(s, maxima, item);
    if constexpr (kStagedRecurrence || kStagedRead) loadNext(item);
    if constexpr (!Traits::kShared && !kStagedRead) storeRead(s, maxima, item);
  }

  // Slabs beyond a head's go to nobody: with NVFP4 reads some warps have none.
  __device__ void start() const {
    const Item first{0, part.warp};
    if (valid(first)) load(first);
  }

  // The item in work is kept where the part is: a warp's word of shared memory.
  static __device__ __forceinline__ Item current(const Part<Traits>& part) {
    const int word = part.savedItem();
    return {word >> 8, kOneSlab ? static_cast<int>(threadOf() / 32) : word & 255};
  }

  __device__ void run() const {
    Item item{0, part.warp};
#pragma unroll 1
    while (valid(item)) {
      part.saveItem(item.index << 8 | item.slab);
      const Part<Traits> own = part.saved(item.index);
      const HeadFlush<Traits> flush{own, sharedAddress(own.shared) + own.warp * kMaxNarrowStages * 8};
      barrierWait(flush.full, parityOf(item));
      flush.finish(item);
      item = next(current(part));
    }
  }
};

}  // namespace replayssm
