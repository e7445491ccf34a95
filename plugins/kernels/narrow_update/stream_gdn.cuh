// Steps of plain decoding that do not flush, for the gated delta rule: a warp streams the state of its heads through two
// stages of its own, as a sequence of blocks that runs over heads and, where it can, into the warp's next part.
//
// Lane (g, c) finishes row 8c + g of each chunk of 32 rows. A head's corrections wait for its state's products: all are
// loaded at once, 16-byte piece i of record j in place i ^ j % 8 of its row, so that eight records are on distinct banks.
#pragma once

#include <utility>

#include "../common/store_again.cuh"
#include "read_gdn.cuh"

namespace replayssm {

template <class Traits>
struct GdnReader {
  using Act = typename Traits::Act;
  using Area = GdnArea<Traits>;
  using Group = GdnGroup<Traits>;
  using Reader = StateReader<Traits::kRead>;
  using Fragments = uint32_t[Traits::kSteps][2];
  // The L2 is told what to keep; the others have no register for that.
  static constexpr bool kBoundByMemory = Traits::kRead == StateFormat::kFloat16;
  const UpdateParams& p;
  const GdnReads& reads;
  char* const area;
  const uint32_t barriers;
  const int warp, lane;

  // The next block's place, how many there are left of the part, and how many were loaded and used.
  const char* codes = nullptr;
  const char* scales = nullptr;
  int left = 0, loaded = 0, used = 0;

  __device__ int chunks() const { return 4 >> reads.splitBits; }  // of a head that are this warp's
  __device__ int firstChunk() const { return (warp & ((1 << reads.splitBits) - 1)) * chunks(); }
  __device__ int headBits() const { return reads.warpBits - reads.splitBits; }
  __device__ int blockSlabs() const { return min(Area::kBlockSlabs, 2 * chunks()); }
  __device__ int headBlocks() const { return max(1, 2 * chunks() / Area::kBlockSlabs); }  // a power of two

  // The part in work is kept in shared memory.
  __device__ void keep(const GdnReads::Part& part) const {
    sharedStore(sharedAddress(area) + Area::kPlace, part.row, part.set);
  }
  __device__ GdnReads::Part part() const {
    const int4 words = sharedWords(sharedAddress(area) + Area::kPlace);
    return {words.x, words.y};
  }

  // Blocks of this share come next.
  __device__ void aim(const GdnShare& share) {
    const CheckpointCopy& copy = p.read;
    const int64_t row = static_cast<int64_t>(share.firstHead) * Traits::kHeadDim + firstChunk() * 32;
    codes = static_cast<const char*>(copy.data) + share.slot * copy.slotBytes + row * Traits::Read::kRowBytes;
    scales = static_cast<const char*>(copy.scale) + share.slot * copy.scaleSlotBytes + row * Traits::Read::kScaleBytes;
    left = share.heads * headBlocks();
  }

  __device__ __forceinline__ void loadBlock() {
    if (left == 0) return;
    const int slabs = blockSlabs();
    if (lane == 0) {
      const int stage = loaded & 1;
      const uint32_t full = barriers + 8 * stage, target = sharedAddress(area) + stage * Area::kStageBytes;
      barrierArriveExpect(full, slabs * 16 * (Traits::Read::kRowBytes + Traits::Read::kScaleBytes));
      if constexpr (kBoundByMemory) {
        bulkLoadOnce(target, codes, slabs * 16 * Traits::Read::kRowBytes, full);
      } else {
        bulkLoad(target, codes, slabs * 16 * Traits::Read::kRowBytes, full);
      }
      if constexpr (Traits::Read::kScaleBytes > 0) {
        bulkLoad(target + Area::kCodeBytes, scales, slabs * 16 * Traits::Read::kScaleBytes, full);
      }
    }
    int rows = slabs * 16;
    if (((left - 1) & (headBlocks() - 1)) == 0) rows += (Traits::kHeadDim << headBits()) - chunks() * 32;
    codes += rows * Traits::Read::kRowBytes;
    scales += rows * Traits::Read::kScaleBytes;
    --left;
    ++loaded;
  }

  __device__ const char* waitBlock() const {
    barrierWait(barriers + 8 * (used & 1), used >> 1 & 1);
    return area + (used & 1) * Area::kStageBytes;
  }
  // The block has been read, and what was read used.
  __device__ __forceinline__ void releaseBlock() {
    __syncwarp();
    ++used;
    loadBlock();
  }

  // Starts the corrections of a head; the token's values.
  __device__ __forceinline__ void loadRecords(const GdnShare& share, int index) const {
    const int lane = laneOf();
    constexpr uint32_t kBytes = Area::kRowBytes;
    const char* ring = static_cast<const char*>(p.ringValue) +
                       (share.slot * p.ringValueSlotStride +
                        static_cast<int64_t>(share.firstHead + (index << headBits())) * p.ringRows * Traits::kHeadDim) * 2 +
                       lane % 16 * 16;
    const uint32_t target = sharedAddress(area) + Area::kRecords + lane / 16 * kBytes;
    // Rows from the ring's end on are a ring's length back.
    const int first = share.ringRow(p, lane / 16), rows = p.ringRows - first, count = share.pending - lane / 16;
    const char* before = ring + first * kBytes;
    const char* wrapped = before - p.ringRows * static_cast<int64_t>(kBytes);
    loadPairs(target, lane % 16 ^ lane / 16, before, wrapped, count, rows, std::make_index_sequence<Traits::kPlainWindow / 2>());
  }
  // Records 2i of `count`, of which those from number `rows` on are found at `wrapped`.
  template <size_t... i>
  static __device__ __forceinline__ void loadPairs(uint32_t target, int piece, const char* before, const char* wrapped,
                                                   int count, int rows, std::index_sequence<i...>) {
    constexpr int kBytes = 2 * Area::kRowBytes;
    const auto load = [&](auto number) {
      constexpr int kPair = decltype(number)::value;
      if (2 * kPair >= count) return;
      pieceLoad<kPair * kBytes, kPair * kBytes>(target + (piece ^ (2 * kPair & 7)) * 16, 2 * kPair < rows ? before : wrapped);
    };
    (load(std::integral_constant<int, i>()), ...);
  }
  __device__ __forceinline__ void loadValues(const GdnShare& share, int index) const {
    const int lane = laneOf();
    const Act* values = static_cast<const Act*>(p.value.data) + share.row * p.value.rowStride +
                        (share.firstHead + (index << headBits())) * p.value.headStride;
    if (lane < 16) pieceLoad(sharedAddress(area) + Area::kValues + lane * 16, values + lane * 8);
    loadsCommit();
  }

  // y = the lane's row of a chunk times both vectors; at: its codes in a stage.
  __device__ void multiplyShares(float (&y)[2], const char* at, const char* scaleRows, const Fragments& b) const {
    const int g = lane / 4, c = lane % 4;
    float sum[4][2];  // of row 8 (i ^ c) + g, the lane's columns
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      StateFragments a;
      float low[4] = {}, high[4] = {};  // blocks 2c and 2c + 1
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 8 * ((2 * m + half) ^ c) + g;
        Reader::unpack(a, half, *reinterpret_cast<const uint4*>(at + row * Traits::Read::kRowBytes + c * 16));
      }
#pragma unroll
      for (int s = 0; s < Traits::kSteps / 2; ++s) {
        mmaAct<__half>(low, a[s], b[s][0], b[s][1]);
        mmaAct<__half>(high, a[s + 4], b[s + 4][0], b[s + 4][1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t both = Reader::blockScales(scaleRows, 8 * ((2 * m + half) ^ c) + g, lane);
        const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&both));
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          sum[2 * m + half][v] = fmaf(low[2 * half + v], scale.x, high[2 * half + v] * scale.y);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float own = sum[0][v] + __shfl_xor_sync(kAllLanes, sum[1][v], 1);
      const float other = sum[2][v] + __shfl_xor_sync(kAllLanes, sum[3][v], 1);
      y[v] = own + __shfl_xor_sync(kAllLanes, other, 2);
    }
  }

  // The same where columns are whole sums, for one slab of the chunk; at: the slab's codes.
  __device__ void multiplySlab(float (&y)[2], const char* at, int m, const Fragments& b) const {
    StateFragments a;
    float low[4] = {}, high[4] = {};
    Reader::load(a, at, nullptr, lane);
#pragma unroll
    for (int s = 0; s < Traits::kSteps / 2; ++s) {
      mmaAct<__half>(low, a[s], b[s][0], b[s][1]);
      mmaAct<__half>(high, a[s + 4], b[s + 4][0], b[s + 4][1]);
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float own = lane % 2 == 0 ? low[v] + high[v] : low[2 + v] + high[2 + v];
      if (lane / 2 % 2 == m) y[v] = own;
    }
  }

  // The same for chunk n of the warp's of a head, waiting for what it needs.
  __device__ void multiplyChunk(float (&y)[2], int n, const Fragments& b) {
    const int within = Area::kBlockSlabs > 2 ? n & (blockSlabs() / 2 - 1) : 0;
    if constexpr (Group::kShares) {
      const char* at = area + (used & 1) * Area::kStageBytes;
      if (within == 0) at = waitBlock();
      multiplyShares(y, at + within * 32 * Traits::Read::kRowBytes,
                     at + Area::kCodeBytes + within * 32 * Traits::Read::kScaleBytes, b);
      if (within == blockSlabs() / 2 - 1) releaseBlock();
    } else if constexpr (Area::kBlockSlabs == 2) {
      const char* at = waitBlock();
#pragma unroll
      for (int m = 0; m < 2; ++m) multiplySlab(y, at + m * 16 * Traits::Read::kRowBytes, m, b);
      if constexpr (Traits::Read::kScaleBytes > 0) {
        const float scale = reinterpret_cast<const float*>(at + Area::kCodeBytes)[lane % 4 * 8 + lane / 4];
        y[0] *= scale;
        y[1] *= scale;
      }
      releaseBlock();
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiplySlab(y, waitBlock(), m, b);
        releaseBlock();
      }
    }
  }

  // What the records give for the lane's row of a chunk: the product of four pieces, two and two from `pieces` on, with the
  // weights.
  __device__ __forceinline__ void recall(float (&y)[2], const uint32_t (&pieces)[2], int offset,
                                         const uint2 (&weight)[3]) const {
    float sum[2][4] = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t x[4];
      loadTransposed(x, pieces[s] + offset);
#pragma unroll
      for (int i = 0; i < 3; ++i) mmaAct<__half>(sum[s], x, weight[i].x, weight[i].y);
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float low = lane % 2 == 0 ? sum[0][v] : sum[0][2 + v], high = lane % 2 == 0 ? sum[1][v] : sum[1][2 + v];
      y[v] = lane / 2 % 2 == 0 ? low : high;
    }
  }

  // y[n]: the products of the warp's last chunk but 3 - n.
  __device__ __forceinline__ void finishHead(const float (&y)[4][2], const GdnShare& share, int index) const {
    const int lane = laneOf();
    char* const area = this->area + hiddenZero();
    const int pending = share.pending, place = index % Area::kWeightHeads, head = share.firstHead + (index << headBits());
    const float4 scalars = *reinterpret_cast<const float4*>(area + Area::kScalars + place * 16);
    uint2 weight[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      weight[i] = *reinterpret_cast<const uint2*>(area + Area::kWeights + place * Area::kWeightBytes + 64 * i +
                                                  (lane / 4 % 2 * 4 + lane % 4) * 8);
    }
    // Element 0 of the lane's is in the warp's last chunk but three.
    const int skipped = 4 - chunks(), base = firstChunk() - skipped + static_cast<int>(hiddenZero()), element = base * 32 + lane % 4 * 8 + lane / 4;
    const int64_t ring = (static_cast<int64_t>(head) * p.ringRows + share.ringRow(p, pending)) * Traits::kHeadDim + element;
    __half* corrections = static_cast<__half*>(p.ringValue) + share.slot * p.ringValueSlotStride + ring;
    uint16_t* raw = static_cast<uint16_t*>(p.ringV) + share.slot * p.ringVSlotStride + ring;
    uint16_t* out = static_cast<uint16_t*>(p.out) + share.row * p.outRowStride + head * p.outHeadStride + element;
    const uint16_t* value = reinterpret_cast<const uint16_t*>(area + Area::kValues) + element;
    // Pieces of even and odd chunks for ldmatrix; a chunk has four, of which two are 16 columns apart.
    const int record = min(lane % 8 + lane / 16 * 8, pending - 1), swap = lane / 8 % 2 ^ record % 8;
    const uint32_t own = sharedAddress(area) + Area::kRecords + record * Area::kRowBytes + ((base + 1) >> 1) * 128;
    uint32_t pieces[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) pieces[i / 2][i % 2] = own + ((4 * (i / 2 ^ base & 1) + 2 * (i % 2)) ^ swap) * 16;
    loadsWaitGroups();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n < skipped) continue;
      float recalled[2] = {y[n][0] * scalars.y, y[n][1] * scalars.z};
      if (pending > 0) {
        float records[2];
        recall(records, pieces[n % 2], n / 2 * 128, weight);
#pragma unroll
        for (int v = 0; v < 2; ++v) recalled[v] = fmaf(scalars.x, records[v], recalled[v]);
      }
      const uint16_t output = Activation<Act>::fromFloat(finishRow<Traits>(
          recalled, value[32 * n], scalars.w, share.product, corrections + 32 * n, raw + 32 * n));
      if constexpr (kBoundByMemory) {
        storeAgain(out + 32 * n, output);
      } else {
        out[32 * n] = output;
      }
    }
  }

  // Asked for here and now: what is made of it is not kept in registers over a head.
  static __device__ __forceinline__ int laneOf() { return static_cast<int>(threadOf() % 32); }

  __device__ Group groupOf(const GdnShare& share) const {
    const bool first = (warp & ((1 << reads.warpBits) - 1)) == 0 && share.firstHead == share.group * p.headsPerGroup;
    return {p, share, area, laneOf(), headBits(), first, firstChunk() == 0};
  }

  // What the heads of a group share, its first heads' weights, and all loads of its first head; what is waited for first is
  // asked for first. start: the sequence of blocks has not begun with the group.
  __device__ __forceinline__ void prepare(Fragments& b, const GdnShare& share, bool start) {
    const Group group = groupOf(share);
    const int lane = group.lane;
    typename Group::HeadNumbers numbers;
    typename Group::Keys keys;
    group.loadKeys(keys);
    group.loadLogs(numbers, 0);
    if (start) aim(share);
#pragma unroll 1
    while (loaded - used < 2 && left > 0) loadBlock();
    waitForPredecessor();
    const auto row = [&](const TokenTensor& x) {
      return reinterpret_cast<const uint4*>(static_cast<const Act*>(x.data) + share.row * x.rowStride +
                                            share.group * x.headStride);
    };
    const uint4 *key = row(p.k), *query = row(p.q);
    uint4 vector[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) vector[i] = loadInput((lane / 4 % 2 == 0 ? key : query) + 4 * i + lane % 4);
    if (share.pending > 0) group.multiplyKeys(keys, vector);
    group.loadToken(numbers, 0);
    loadRecords(share, 0);
    loadValues(share, 0);
    const int piece = vectorPiece<Traits>(lane);
    group.makeVectors(loadInput((lane < 16 ? key : query) + piece), loadInput((lane < 16 ? query : key) + piece));
    __syncwarp();
    group.takeFragments(b);
    __syncwarp();
    group.makeWeights(numbers, 0);
    __syncwarp();
  }

  // The committed keys of what comes next, into the L2.
  __device__ __forceinline__ void prefetchKeys(const GdnShare& share) const {
    const Act* ring = static_cast<const Act*>(p.ringKey) + share.slot * p.ringKeySlotStride +
                      static_cast<int64_t>(share.group) * p.ringRows * Traits::kStateDim;
    if (lane / 2 < share.pending) prefetchLine(ring + share.ringRow(p, lane / 2) * Traits::kStateDim + lane % 2 * 64);
  }

  // A part's share. start: the sequence of blocks has not begun with it. early, late: called once each, in this order, for
  // what comes after it, the second when no block of this part is left to load.
  template <class Early, class Late>
  __device__ __forceinline__ void run(const GdnShare& own, bool start, const Early& early, const Late& late) {
    const int heads = own.heads;
    Fragments b;
    if (lane == 0) own.save(area + Area::kShare);
    if (heads > 0) prepare(b, own, start);
    early();
    bool asked = false;
#pragma unroll 1
    for (int index = 0; index < heads; ++index) {
      if (index % Area::kWeightHeads == 0 && index > 0) {
        const GdnShare share = GdnShare::saved(area + Area::kShare);
        const Group group = groupOf(share);
        typename Group::HeadNumbers numbers;
        group.loadLogs(numbers, index);
        group.loadToken(numbers, index);
        group.makeWeights(numbers, index);
        __syncwarp();
      }
      float y[4][2];
#pragma unroll 1
      for (int n = 0; n < chunks(); ++n) {
        if (left == 0 && !asked) {
          asked = true;
          late();
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          y[i][0] = y[i + 1][0];
          y[i][1] = y[i + 1][1];
        }
        multiplyChunk(y[3], n, b);
      }
      const GdnShare share = GdnShare::saved(area + Area::kShare);
      finishHead(y, share, index);
      __syncwarp();
      if (index + 1 < heads) {
        loadRecords(share, index + 1);
        loadValues(share, index + 1);
      }
    }
    if (!asked) late();
  }

  // Outputs of a row without a token.
  __device__ void writeZeros(const GdnShare& share) const {
#pragma unroll 1
    for (int index = 0; index < share.heads; ++index) {
      const int head = share.firstHead + (index << headBits());
      uint16_t* out = static_cast<uint16_t*>(p.out) + share.row * p.outRowStride + head * p.outHeadStride;
#pragma unroll 1
      for (int i = lane; i < Traits::kHeadDim; i += 32) out[i] = Activation<Act>::fromFloat(0.0f);
    }
  }
};

}  // namespace replayssm
