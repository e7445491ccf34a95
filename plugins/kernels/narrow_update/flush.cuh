// Flushing steps: the CTA takes its part's heads one after the other; their slabs are dealt to the warps in turn. A slab
// goes from the high-precision checkpoint through shared memory into registers, is folded, read out and written back,
// with stochastic rounding; while the next one is loaded, the read copy is written to nearest. For NVFP4 a warp tells the
// slab's largest magnitude, and waits for the head's before it writes the read copy
// (with float16 that is not kRoundsFirst: before it rounds).
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
  static constexpr bool kOwnSlab = Traits::kWarps == Traits::kSlabs;  // the same one of every head

  struct Item {
    int index, slab;
  };

  static __device__ __forceinline__ HeadFlush of(const Part<Traits>& part) {
    return {part, sharedAddress(part.shared) + part.warp * kMaxNarrowStages * 8};
  }

  __device__ bool valid(const Item& item) const { return item.index < part.heads && item.slab < Traits::kSlabs; }

  __device__ Item first() const { return {part.warp / Traits::kSlabs, part.warp % Traits::kSlabs}; }

  __device__ Item next(Item item) const {
    if constexpr (kOwnSlab) return {item.index + 1, item.slab};
    item.index += Traits::kWarps / Traits::kSlabs;
    item.slab += Traits::kWarps % Traits::kSlabs;
    return item.slab < Traits::kSlabs ? item : Item{item.index + 1, item.slab - Traits::kSlabs};
  }

  // Of the item's place in this warp's sequence.
  __device__ uint32_t parityOf(const Item& item) const {
    return (item.index * Traits::kSlabs + item.slab) / Traits::kWarps & 1;
  }

  // Rows of a checkpoint copy or of its scales.
  __device__ char* rows(FlushBase base, const Item& item, int rowBytes) const {
    if (rowBytes == 0) return nullptr;
    return part.pointer(base) + static_cast<uint32_t>(item.index * Traits::kSlabs + item.slab) * (16 * rowBytes);
  }

  __device__ const char* values() const { return part.own() + part.layout.slabValueOffset; }

  __device__ void load(const Item& item) const {
    const NarrowLayout& layout = part.layout;
    const uint32_t target = sharedAddress(part.own());
    if (part.lane == 0) {
      barrierExpect(full, 16 * (Hp::kRowBytes + Hp::kScaleBytes));
      bulkLoadAgain(target, rows(FlushBase::kState, item, Hp::kRowBytes), 16 * Hp::kRowBytes, full);
      if constexpr (Hp::kScaleBytes > 0) {
        bulkLoad(target + layout.slabScaleOffset, rows(FlushBase::kStateScale, item, Hp::kScaleBytes),
                 16 * Hp::kScaleBytes, full);
      }
      const Item after = next(item);
      if (kPrefetches && valid(after)) {
        bulkPrefetch(rows(FlushBase::kState, after, Hp::kRowBytes), 16 * Hp::kRowBytes);
      }
    }
    // What a flush folds: x, or for GDN raw values, from which it derives the corrections anew.
    const auto values = [&](FlushBase base, int64_t headStride) {
      return reinterpret_cast<const Act*>(part.pointer(base)) + item.index * headStride + item.slab * 16;
    };
    part.template loadRows<2, 32>(target + layout.slabValueOffset, Traits::kSlabValuePitch,
                                  values(FlushBase::kInputs, part.p.ringRows * Traits::kHeadDim), Traits::kHeadDim,
                                  values(FlushBase::kTokens, part.p.value.headStride), part.p.value.tokenStride,
                                  part.lane);
    __syncwarp();
    loadsArrive(full);
  }

  // The CTA's heads take turns with kMaximumRows rows of magnitudes, a word a slab, which are in the order of their bits,
  // and as many barriers. No warp is further ahead of another: each has a slab of one of two heads in succession.
  __device__ char* exchange() const { return part.shared + part.layout.amaxOffset; }
  __device__ int* headCounts() const { return reinterpret_cast<int*>(exchange() + kHeadCount); }
  __device__ uint32_t* magnitudes(int head) const {
    return reinterpret_cast<uint32_t*>(exchange()) + head % kMaximumRows * 16;
  }
  __device__ uint32_t headBarrier(int head) const {
    return sharedAddress(exchange()) + kMaximumBarriers + head % kMaximumRows * 8;
  }

  // The slab's largest finite magnitude, for all warps that have one of the head's.
  __device__ void tellLargest(const SlabMaxima& maxima, const Item& item) const {
    const uint32_t own = __reduce_max_sync(kAllLanes, __float_as_uint(maxima.all()));
    if (part.lane == 0) {
      const int head = headCounts()[0] + item.index;
      magnitudes(head)[item.slab] = own;
      barrierArrive(headBarrier(head));
    }
  }
  __device__ float headLargest(int index) const {
    const int head = headCounts()[0] + index;
    barrierWait(headBarrier(head), head / kMaximumRows & 1);
    return __uint_as_float(__reduce_max_sync(kAllLanes, magnitudes(head)[part.lane % Traits::kSlabs]));
  }

  // What a slab's draws share; looked up anew.
  __device__ StateRandom random() const {
    const Item item = current(part);
    return {part.base(FlushBase::kSeed),
            static_cast<uint32_t>(part.p.layer) << 16 |
                static_cast<uint32_t>(part.p.headOffset + part.saved(-1).firstHead + item.index),
            static_cast<uint32_t>(part.base(FlushBase::kPosition))};
  }

  template <class Encoder, class Run>
  static __device__ __forceinline__ void storeNearest(const Encoder& to, const Run& run) {
    typename Encoder::Codes codes;
    if constexpr (Encoder::kNearestIsStraight) {
      to.nearest(codes, run);
    } else if (!__all_sync(kAllLanes, to.nearest(codes, run))) {
      to.nearestAnyway(codes, run);
    }
    to.store(codes, run);
  }

  // Rounds a run of the recurrence. shared: what the slab's draws share, where it is kept over runs.
  template <class Run>
  __device__ __forceinline__ void storeRounded(const typename HpCodec::Encoder& to, const Run& run,
                                               const StateRandom& shared) const {
    constexpr int kPieces = Traits::kPiecesAtOnce;
    const int row = current(part).slab * 16 + to.lane / 4 + 8 * run.half;
    const StateRandom random = Traits::kRoomy ? shared : this->random();
    typename HpCodec::Encoder::Codes codes;
#pragma unroll
    for (int first = 0; first < 2; first += kPieces) {
      PhiloxWords draws[2 * kPieces];
      drawPieces<Traits::kExchanged, kPieces>(draws, random, row, 2 * run.block + first, to.lane);
      bool straight = true;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        straight &= to.stochastic(codes[first + i], run.piece(first + i), run, draws + 2 * i);
      }
      if (!__all_sync(kAllLanes, straight)) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          to.stochasticAnyway(codes[first + i], run.piece(first + i), run, draws + 2 * i);
        }
      }
      if constexpr (kStagedRecurrence) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) to.storePiece(codes[first + i], run, first + i);
      }
    }
    if constexpr (!kStagedRecurrence) to.store(codes, run);
  }

  __device__ typename HpCodec::Encoder recurrenceEncoder(const SlabMaxima& maxima, const Item& item) const {
    return {maxima, part.own() + part.layout.codeOffset, rows(FlushBase::kState, item, Hp::kRowBytes),
            rows(FlushBase::kStateScale, item, Hp::kScaleBytes), 1.0f, part.lane};
  }

  __device__ typename LpCodec::Encoder readEncoder(const SlabMaxima& maxima, const Item& item) const {
    float headScale = 1.0f;
    if constexpr (Traits::kWholeHead) {
      headScale = nvfp4HeadScale(headLargest(item.index));
      if (item.slab == 0 && part.lane == 0) {
        part.p.read.headScale[part.slot * part.p.read.headScaleSlotStride + part.firstHead + item.index] = headScale;
      }
    }
    return {maxima, part.own(), rows(FlushBase::kRead, item, Lp::kRowBytes),
            rows(FlushBase::kReadScale, item, Lp::kScaleBytes), headScale, part.lane};
  }

  // Outputs of rows g and g + 8, from S q of the folded slab, decayed; the token's values are appended.
  __device__ void finishPlain(const float (&recalled)[2], const Item& item, const char* values, int lane) const {
    using A = Activation<Act>;
    const float weight = plainWeights(part, item.index)[18];
    const char* value = values + part.pending * Traits::kSlabValuePitch + lane / 4 * 2;
    float sum[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16 * half));
      sum[2 * half] = fmaf(weight, x, recalled[half]);
    }
    part.writeOutput(part.firstHead + item.index, item.slab, sum);
    part.appendValues(part.firstHead + item.index, values, Traits::kSlabValuePitch, item.slab * 16, 2);
  }

  // Folds and computes the outputs: one token, up to 16 records.
  __device__ void foldPlain(Slab& s, const Item& item, const char* values, int lane) const {
    const float* at = plainWeights(part, item.index);
    const char* scales = part.own() + part.layout.slabScaleOffset;
    float weighted[4][2], recalled[2];
    weighValues<Traits>(weighted, values, PlainFolds{at}, 0, part.pending, lane);
    if constexpr (Traits::kReadsCodes) {  // before there is a slab in registers
      CodeProduct<Traits> product(reinterpret_cast<const char*>(part.fragments()), lane);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        product.add({HpCodec::halves(part.own(), b, 0, lane), HpCodec::halves(part.own(), b, 1, lane)}, b);
      }
      addWeighted(recalled, weighted, part.dotOf(lane % 4));
      addLanes(recalled);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = at[19] * HpCodec::rowScale(scales, half, lane);
        recalled[half] = fmaf(scale, product.row(half), at[17] * recalled[half]);
      }
      finishPlain(recalled, item, values, lane);
    }
    HpCodec::decode(s, part.own(), scales, lane);
    foldFragments<Traits>(s, part.keys(), weighted, at[16], 0, part.pending, lane);
    if constexpr (!Traits::kReadsCodes) {
      readSlabOnce<Traits>(recalled, s, part.queries(), lane);
      recalled[0] *= at[17];
      recalled[1] *= at[17];
      finishPlain(recalled, item, values, lane);
    }
  }

  // The gated delta rule's for one token. Each step looks up anew where it is: nothing but the slab is kept over one.
  __device__ void foldPlainGdn(Slab& s) const {
    float recall[2][4], weighted[4][2];
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      HpCodec::decode(s, now.own(), nullptr, now.lane);
      recallSlab(recall, s, now);
    }
    solvePlainGdn(weighted, recall);
    foldSolved(s, weighted);
    const Item item = current(part);
    const Part<Traits> now = part.saved(item.index);
    float sum[4];
    readToken(sum, s, now);
    finishToken(sum, now, item.index, item.slab, of(now).values());
  }

  // The same by way of codes, of which outputs come before there is a slab in registers.
  __device__ void foldPlainCodes(Slab& s) const {
    float recall[2][4], weighted[4][2], product[2];
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      const int group = now.groupOf(item.index), number = now.lane / 4;
      recallCodes<Traits, HpCodec>(recall, product, now.own(), now.vectorHalves(),
                                   {now.keyHalf(group, number), now.keyHalf(group, number + 8)}, now.lane);
    }
    solvePlainGdn(weighted, recall);
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      const HeadFlush<Traits> flush = of(now);
      float sum[4];
      readTokenCodes(sum, weighted, product, flush.rowScales(), *HeadSolve{now.solves(item.index)}.total(), now);
      finishToken(sum, now, item.index, item.slab, flush.values());
    }
    {
      const Part<Traits> now = part.saved(-1);
      HpCodec::decode(s, now.own(), now.own() + now.layout.slabScaleOffset, now.lane);
    }
    foldSolved(s, weighted);
  }

  __device__ float2 rowScales() const {
    const char* scales = part.own() + part.layout.slabScaleOffset;
    return make_float2(HpCodec::rowScale(scales, 0, part.lane), HpCodec::rowScale(scales, 1, part.lane));
  }

  __device__ void solvePlainGdn(float (&weighted)[4][2], const float (&recall)[2][4]) const {
    const Item item = current(part);
    const Part<Traits> now = part.saved(item.index);
    const HeadFlush<Traits> flush = of(now);
    solveSlab<Traits>(weighted, recall, flush.rowScales(), {now.solves(item.index)}, flush.values(), now.pending,
                      now.lane);
  }

  __device__ void foldSolved(Slab& s, const float (&weighted)[4][2]) const {
    const Item item = current(part);
    const Part<Traits> now = part.saved(item.index);
    foldFragments<Traits>(s, now.keys(), weighted, *HeadSolve{now.solves(item.index)}.total(), 0, now.pending, now.lane);
  }

  // The same for any number of tokens and records.
  __device__ void foldAny(float (&sum)[1][4], Slab& s) const {
    HeadWeights weights;
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      weights.load(now.dt(item.index), now.scalars()[item.index], now.pending, now.tokens, now.lane);
      HpCodec::decode(s, now.own(), now.own() + now.layout.slabScaleOffset, now.lane);
      foldSlab<Traits>(s, now.keys(), of(now).values(), weights.decay, now.pending, now.lane);
    }
    const Item item = current(part);
    const Part<Traits> now = part.saved(item.index);
    const int pending = now.pending, tokens = now.tokens, lane = now.lane;
    readSlab<Traits, 1>(sum, s, {now.vectorRow(lane / 4)}, {lane / 4 < tokens}, lane);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float factor = expf(__shfl_sync(kAllLanes, weights.decay.prefix, 2 * (lane % 4) + e));
      sum[0][e] *= factor;
      sum[0][2 + e] *= factor;
    }
    weights.skip = now.p.skip != nullptr ? now.scalars()[kMaxPartHeads + item.index] : 0.0f;
    float weight[4];
    recordWeights<Traits, true>(weight, now.dots()[lane], weights, pending, pending, tokens, lane);
    addRecords<Act, 1, Traits::kSlabValuePitch, true>(
        sum, sharedAddress(of(now).values()) + pending * Traits::kSlabValuePitch, weight, tokens, lane);
  }

  __device__ void finish(const Item& item) const {
    const int lane = part.lane;
    Slab s;
    if constexpr (Traits::kRecallsCodes) {
      foldPlainCodes(s);
    } else if constexpr (Traits::kPlainGdn) {
      foldPlainGdn(s);
    } else if constexpr (Traits::kPlain) {
      foldPlain(s, item, values(), lane);
    } else {
      const char* values = this->values();
      float sum[1][4] = {};
      if constexpr (Traits::kGdn) {
        HpCodec::decode(s, part.own(), part.own() + part.layout.slabScaleOffset, lane);
        flushGdn(sum[0], s, part, item.index, item.slab, values, lane);
      } else {
        foldAny(sum, s);
      }
      const Item again = current(part);
      const Part<Traits> now = part.saved(again.index);
      now.writeOutput(now.firstHead + again.index, again.slab, sum[0]);
      now.appendValues(now.firstHead + again.index, values, Traits::kSlabValuePitch, again.slab * 16, 2);
    }
    storeBoth(s);
  }

  __device__ void loadNext(const Item& item) const {
    asyncProxyFence();  // the reads have happened before the next slab may arrive in their place
    __syncwarp();
    if (valid(next(item))) load(next(item));
  }

  // Both copies are written from the same float32 numbers, of a float16 recurrence run by run where the slab is lost by it.
  // What goes by way of the slab's place comes before the next load.
  __device__ void storeBoth(Slab& s) const {
    constexpr bool kLoadsFirst = !kStagedRead && (Traits::kOwnStage || !kStagedRecurrence);
    constexpr bool kBoth = !Traits::kShared && Traits::kRecurrence == StateFormat::kFloat16;
    const SlabMaxima maxima(s);
    {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      const HeadFlush<Traits> flush = of(now);
      if constexpr (kLoadsFirst) flush.loadNext(item);
      if constexpr (Traits::kWholeHead) flush.tellLargest(maxima, item);
      const typename HpCodec::Encoder hp = flush.recurrenceEncoder(maxima, item);
      const StateRandom shared = Traits::kRoomy ? random() : StateRandom{};
      if constexpr (Traits::kRecurrence == StateFormat::kFloat32) {
        eachRun<Traits::kRunOrder>(s, maxima, [&](const auto& run) { hp.storeExactly(run); });
      } else if constexpr (!kBoth || Traits::kRoundsFirst) {
        eachRun<Traits::kRunOrder>(s, maxima, [&](const auto& run) { storeRounded(hp, run, shared); });
      } else {
        const typename LpCodec::Encoder lp = flush.readEncoder(maxima, item);
        eachRun<Traits::kRunOrder>(s, maxima, [&](const auto& run) {
          storeNearest(Traits::kRoomy ? lp : lookedUp(lp), run);
          storeRounded(hp, run, shared);
        });
      }
      if constexpr (kBoth && !Traits::kRoomy) {
        recurrenceEncoder(maxima, current(part)).finish();
      } else {
        hp.finish();
      }
      if constexpr (Traits::kRoundsFirst) {
        const typename LpCodec::Encoder lp = flush.readEncoder(maxima, item);
        eachRun<RunOrder::kUnrolled>(s, maxima, [&](const auto& run) { storeNearest(lp, run); });
      }
      if constexpr (kStagedRead) flush.storeRead(s, maxima, item);
    }
    if constexpr (!kLoadsFirst) {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      of(now).loadNext(item);
    }
    if constexpr (!Traits::kShared && !kBoth && !kStagedRead) {
      const Item item = current(part);
      const Part<Traits> now = part.saved(item.index);
      of(now).storeRead(s, maxima, item);
    }
  }

  // The encoder with its addresses looked up anew, so that they are not kept in registers over runs.
  __device__ typename LpCodec::Encoder lookedUp(typename LpCodec::Encoder lp) const {
    const Item item = current(part);
    lp.at = rows(FlushBase::kRead, item, Lp::kRowBytes);
    if constexpr (Lp::kScaleBytes > 0 && Traits::kWholeHead) lp.scales = rows(FlushBase::kReadScale, item, Lp::kScaleBytes);
    return lp;
  }

  __device__ void storeRead(Slab& s, const SlabMaxima& maxima, const Item& item) const {
    const typename LpCodec::Encoder lp = readEncoder(maxima, item);
    eachRun<RunOrder::kUnrolled>(s, maxima, [&](const auto& run) { storeNearest(lp, run); });
    lp.finish();
  }

  // Once a CTA, before its first flush.
  static __device__ void init(const NarrowLayout& layout, char* shared) {
    if constexpr (Traits::kWholeHead) {
      char* exchange = shared + layout.amaxOffset;
      const int thread = static_cast<int>(threadIdx.x);
      if (thread < kMaximumRows) barrierInit(sharedAddress(exchange) + kMaximumBarriers + thread * 8, Traits::kSlabs);
      if (thread == 0) *reinterpret_cast<int2*>(exchange + kHeadCount) = make_int2(0, 0);
    }
  }

  // A part's beginning, when all warps are done with the last one's. A barrier of the CTA comes before its run().
  __device__ void start() const {
    if constexpr (Traits::kWholeHead) {
      if (threadIdx.x == 0) {  // heads before this part, and its own
        headCounts()[0] += headCounts()[1];
        headCounts()[1] = part.heads;
      }
    }
    part.saveBases();
    if (valid(first())) load(first());
  }

  // Two steps of the part with a barrier of the CTA before, between and behind them: what comes of keys and queries, beside
  // Part::multiplyKeys; then what slabs look up, after which committed keys are in another order.
  __device__ void prepareVectors() const {
    if constexpr (Traits::kReadsCodes) {
      if (part.warp == Traits::kWarps - 1) {
        storeVector<Traits>(reinterpret_cast<char*>(part.fragments()), part.fragmentFactors(), part.queries(), part.lane);
      }
    }
    if constexpr (Traits::kGdn) multiplyRecords(part);
    if constexpr (Traits::kRecallsCodes) {
      makeKeyHalves(part);
      makeVectorHalves(part);
    }
  }
  __device__ void makeWeights() const {
    if constexpr (Traits::kPlain) setPlainFolds(part);
    if constexpr (Traits::kPlainGdn) solveHeads(part);
    if constexpr (Traits::kTiledKeys) tileKeys(part);
  }

  // The item in work is kept where the part is: a warp's word of shared memory.
  static __device__ __forceinline__ Item current(const Part<Traits>& part) {
    const int word = part.savedItem();
    return {word >> 8, kOwnSlab ? static_cast<int>(threadOf() / 32) : word & 255};
  }

  __device__ void run() const {
    Item item = first();
#pragma unroll 1
    while (true) {
      const Part<Traits> own = part.saved(item.index);
      const HeadFlush<Traits> flush = of(own);
      if (!flush.valid(item)) return;
      own.saveItem(item.index << 8 | item.slab);
      barrierWait(flush.full, parityOf(item));
      flush.finish(item);
      item = next(current(part));
    }
  }
};

}  // namespace replayssm
