// What a CTA knows of its part, and the loads and sums that all its warps share: keys, queries, step sizes, head
// scalars, key-query products. Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "../common/mbarrier.cuh"
#include "../replay_update/params.h"
#include "../replay_update/readout.cuh"
#include "records.cuh"

namespace replayssm {

// Until this thread's committed groups of loads have landed; later loads may be on their way.
__device__ __forceinline__ void loadsWaitGroups() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// The thread, asked for here and now.
__device__ __forceinline__ uint32_t threadOf() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Nothing, which the compiler does not know: no part of a sum with it is known before, and kept in a register over a slab.
__device__ __forceinline__ uint32_t hiddenZero() { return threadOf() / 1024; }

// Four words of shared memory, read here and now.
__device__ __forceinline__ int4 sharedWords(uint32_t at) {
  int4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(at));
  return words;
}

// What a flush looks up of its part for every slab, eight bytes each: where the part's first slab begins in the
// recurrence and in the read copy, where its first head's values are, and what its draws share.
enum class FlushBase { kState, kStateScale, kRead, kReadScale, kInputs, kTokens, kSeed, kPosition };

__device__ __forceinline__ uint64_t sharedLong(uint32_t at) {
  uint64_t value;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(at));
  return value;
}

// A warp's place in the part, and the part itself.
template <class Traits>
struct Part {
  using Act = typename Traits::Act;
  const UpdateParams& p;
  const NarrowLayout& layout;
  char* const shared;
  const int warp, lane;
  int row, slot, tokens, origin, pending;
  int group, firstHead, heads;  // heads firstHead .. firstHead + heads - 1; the first one's group
  int groups;                   // of these heads
  char* area;                   // what the group's keys and factors are offset from

  // The part as its group number `index` sees it; heads are still counted from the part's first.
  __device__ Part inGroup(int index) const {
    Part other = *this;
    other.group += index;
    other.area += index * layout.groupBytes;
    return other;
  }
  // Which of the part's groups head `index` belongs to.
  __device__ int groupOf(int index) const { return Traits::kMostGroups > 1 ? index / p.headsPerGroup : 0; }
  __device__ char* groupArea() const { return Traits::kMostGroups > 1 ? area : shared; }
  // Of plain decoding without a flush, what two parts have at a time.
  __device__ char* vectorArea() const { return Traits::kPlain ? area : groupArea(); }

  // A flush keeps nothing of its part in registers over a slab: save() once by any thread, saved() where it is needed.
  __device__ void save() const {
    uint4* at = reinterpret_cast<uint4*>(shared + kSavedPart);
    const auto word = [](int x) { return static_cast<uint32_t>(x); };
    at[0] = make_uint4(word(row), word(slot), word(Traits::kOneToken ? groups : tokens), word(origin));
    at[1] = make_uint4(word(pending), word(group), word(firstHead), word(heads));
  }
  // A word of this warp's, likewise.
  __device__ __forceinline__ uint32_t itemAddress() const {
    const uint32_t areas = sharedAddress(shared) + layout.privateOffset + hiddenZero();
    return areas + threadOf() / 32 * layout.privateBytes + Traits::kSlabBytes;
  }
  __device__ __forceinline__ void saveItem(int word) const {
    __syncwarp();  // every lane has read the last one
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(itemAddress()), "r"(word) : "memory");
    __syncwarp();
  }
  __device__ __forceinline__ int savedItem() const {
    int word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(itemAddress()) : "memory");
    return word;
  }
  // What is read here and now of the warp's area behind the item.
  __device__ __forceinline__ uint64_t base(FlushBase which) const {
    return sharedLong(sharedAddress(own()) + Traits::kSlabBytes + 16 + 8 * static_cast<uint32_t>(which));
  }
  __device__ __forceinline__ char* pointer(FlushBase which) const {
    return static_cast<char*>(__cvta_global_to_generic(base(which)));
  }
  // By every warp, before its first slab.
  __device__ void saveBases() const {
    const auto copy = [&](const void* data, int64_t slotBytes, int rowBytes) {
      return reinterpret_cast<uint64_t>(data) + slot * slotBytes +
             static_cast<int64_t>(firstHead) * Traits::kHeadDim * rowBytes;
    };
    using Hp = typename Traits::Recurrence;
    using Lp = typename Traits::Read;
    uint64_t* to = reinterpret_cast<uint64_t*>(own() + Traits::kSlabBytes + 16);
    if (lane == 0) {
      to[0] = copy(p.recurrence.data, p.recurrence.slotBytes, Hp::kRowBytes);
      to[1] = copy(p.recurrence.scale, p.recurrence.scaleSlotBytes, Hp::kScaleBytes);
      to[2] = copy(p.read.data, p.read.slotBytes, Lp::kRowBytes);
      to[3] = copy(p.read.scale, p.read.scaleSlotBytes, Lp::kScaleBytes);
      to[4] = reinterpret_cast<uint64_t>(ringInputs(firstHead));
      to[5] = reinterpret_cast<uint64_t>(tokenValues(firstHead));
    } else if (lane == 1 && Traits::kRecurrence != StateFormat::kFloat32) {
      to[6] = static_cast<uint64_t>(__ldg(p.seed + slot));
      to[7] = static_cast<uint32_t>(__ldg(p.position + slot));
    }
    __syncwarp();
  }

  // As the group of the part's head `index` sees it, or (-1) the first group.
  __device__ __forceinline__ Part saved(int index) const {
    const uint32_t thread = threadOf();
    const int4 low = sharedWords(sharedAddress(shared) + kSavedPart);
    const int4 high = sharedWords(sharedAddress(shared) + kSavedPart + 16);
    const int inner = index < 0 ? 0 : groupOf(index);
    return Part{p,      layout,           shared,            static_cast<int>(thread / 32),
                static_cast<int>(thread % 32), low.x, low.y, Traits::kOneToken ? 1 : low.z, low.w, high.x,
                high.y + inner, high.z, high.w, Traits::kPlainGdn ? low.z : 1, shared + inner * layout.groupBytes};
  }

  __device__ bool flushes() const { return pending + tokens > p.window; }

  __device__ int ringRow(int record) const {
    const int r = origin + record;
    return r < p.ringRows ? r : r - p.ringRows;
  }

  __device__ const float* dt(int index) const {
    return reinterpret_cast<const float*>(shared + layout.dtOffset) + index * layout.dtPitch;
  }
  __device__ float* scalars() const { return reinterpret_cast<float*>(shared + layout.scalarOffset); }
  __device__ float4* dots() const { return reinterpret_cast<float4*>(vectorArea() + layout.dotOffset); }
  __device__ const char* keys() const { return groupArea() + layout.keyOffset; }
  __device__ const char* queries() const { return groupArea() + layout.queryOffset; }
  __device__ int vectors() const { return tokens * Traits::kVectorsPerToken; }
  // A token's query, or for GDN its key, then its query.
  __device__ const char* vectorRow(int vector) const {
    const char* rows = Traits::kGdn && vector % 2 == 0 ? keys() + pending * Traits::kKeyPitch : queries();
    return rows + vector / Traits::kVectorsPerToken * Traits::kKeyPitch;
  }

  // GDN: factors of the committed keys, of the step's vectors, beta and key products of a head's records.
  __device__ float* factors() const { return reinterpret_cast<float*>(groupArea() + layout.factorOffset); }
  __device__ float* norms() const { return reinterpret_cast<float*>(groupArea() + layout.normOffset); }
  __device__ const float* beta(int index) const {
    return reinterpret_cast<const float*>(shared + layout.betaOffset) + index * layout.dtPitch;
  }
  // Vectors as right operands of a product with codes, and what such products are multiplied by.
  __device__ uint4* fragments() const { return reinterpret_cast<uint4*>(vectorArea() + layout.fragmentOffset); }
  __device__ float* fragmentFactors() const {
    return reinterpret_cast<float*>(vectorArea() + layout.fragmentOffset + vectors() * Traits::kStateDim * 2);
  }
  __device__ float* gram() const { return reinterpret_cast<float*>(groupArea() + layout.gramOffset); }
  // Of the part's group `index`: a committed key in float16, scaled to its top binade, and what is recalled with keys
  // is multiplied by; in the order of solve_gdn.cuh.
  __device__ char* keyHalf(int index, int number) const {
    static_assert(Traits::kWarps == 8 || !Traits::kRecallsCodes, "groups: 1, 2 or 4; 2, 4 or 8 rows a warp");
    const int row = index * 16 + number, bits = 1 + groups / 2;
    return shared + layout.privateOffset + (row >> bits) * layout.privateBytes + layout.halfOffset +
           (row & ((1 << bits) - 1)) * Traits::kHalfPitch;
  }
  __device__ float* halfFactors(int index) const {
    return reinterpret_cast<float*>(shared + layout.halfFactorOffset) + index * 16;
  }
  // The token's vectors in float16 for readCodesOnce, products of records with them as dots() has them, and what the vectors
  // are multiplied by.
  __device__ char* vectorHalves() const { return groupArea() + layout.vectorOffset; }
  __device__ float4* vectorDots() const { return reinterpret_cast<float4*>(vectorHalves() + Traits::kVectorDots); }
  __device__ float* vectorFactors() const { return reinterpret_cast<float*>(vectorHalves() + Traits::kVectorFactors); }
  // HeadSolve of the part's head `index`.
  __device__ char* solves(int index) const {
    return shared + layout.privateOffset + index % Traits::kWarps * layout.privateBytes + layout.solveOffset +
           index / Traits::kWarps * Traits::kSolveBytes;
  }
  __device__ char* own() const { return shared + layout.privateOffset + warp * layout.privateBytes; }

  // kPieces 16-byte pieces of every record: committed ones from ring rows of `rowElements`, then this step's. By
  // kThreads cooperating threads, of which a few at the end may stay idle.
  template <int kPieces, int kThreads>
  __device__ __forceinline__ void loadRows(uint32_t target, int pitch, const Act* ring, int rowElements,
                                           const Act* input, int64_t tokenStride, int thread) const {
    constexpr int kRows = kThreads / kPieces;
    const int first = thread / kPieces, piece = thread % kPieces;
    if (first >= kRows) return;
    const int total = pending + tokens;
    constexpr int kPasses = (Traits::kPlainWindow + kRows) / kRows;  // enough for plain steps
#pragma unroll(Traits::kPlain ? kPasses : 2)
    for (int pass = 0; pass < (Traits::kPlain ? kPasses : total); ++pass) {
      const int record = first + pass * kRows;
      if (record >= total) break;
      const Act* source = ring + ringRow(record) * rowElements;
      if (record >= pending) source = Traits::kMaxTokens == 1 ? input : input + (record - pending) * tokenStride;
      pieceLoad(target + record * pitch + piece * 16, source + piece * 8);
    }
  }

  // Starts the keys and queries of the part's only group, for GDN with the committed keys' factors.
  __device__ void loadKeys(int thread) const {
    const uint32_t base = sharedAddress(shared);
    const Act* ring = static_cast<const Act*>(p.ringKey) + slot * p.ringKeySlotStride +
                      static_cast<int64_t>(group) * p.ringRows * Traits::kStateDim;
    const Act* keys = static_cast<const Act*>(p.k.data) + row * p.k.rowStride + group * p.k.headStride;
    const Act* query = static_cast<const Act*>(p.q.data) + row * p.q.rowStride + group * p.q.headStride;
    constexpr int kPieces = Traits::kStateDim / 8;
    loadRows<kPieces, Traits::kThreads>(base + layout.keyOffset, Traits::kKeyPitch, ring, Traits::kStateDim, keys,
                                        p.k.tokenStride, thread);
#pragma unroll 1
    for (int i = thread; i < tokens * kPieces; i += Traits::kThreads) {
      const int token = i / kPieces, piece = i % kPieces;
      pieceLoad(base + layout.queryOffset + token * Traits::kKeyPitch + piece * 16,
                query + token * p.q.tokenStride + piece * 8);
    }
    if constexpr (Traits::kGdn) {
      const float* ringFactor = p.ringKeyFactor + slot * p.ringKeyFactorSlotStride +
                                static_cast<int64_t>(group) * p.ringRows;
      if (thread < pending) wordLoad(base + layout.factorOffset + thread * 4, ringFactor + ringRow(thread));
    }
  }

  // Starts what is known of the part's heads, and makes all of this thread's loads one group.
  __device__ void loadHeads(int thread) const {
    const uint32_t base = sharedAddress(shared);
    const float* step = static_cast<const float*>(p.dt.data) + row * p.dt.rowStride;
#pragma unroll 1
    for (int index = warp; index < heads; index += Traits::kWarps) {
      const int head = firstHead + index;
      const float* ringDt = p.ringDt + slot * p.ringDtSlotStride + static_cast<int64_t>(head) * p.ringRows;
#pragma unroll 1
      for (int j = lane; j < pending + tokens; j += 32) {
        wordLoad(base + layout.dtOffset + (index * layout.dtPitch + j) * 4,
                 j < pending ? ringDt + ringRow(j)
                             : step + head * p.dt.headStride + (j - pending) * p.dt.tokenStride);
      }
    }
    if constexpr (Traits::kGdn) loadBeta(base);
    if (thread < heads) {
      const uint32_t target = base + layout.scalarOffset + thread * 4;
      if constexpr (!Traits::kGdn) {
        wordLoad(target, p.a + firstHead + thread);
        if (p.skip != nullptr) wordLoad(target + kMaxPartHeads * 4, p.skip + firstHead + thread);
      }
      if constexpr (Traits::kRead == StateFormat::kE2m1) {
        wordLoad(target + 2 * kMaxPartHeads * 4,
                 p.read.headScale + slot * p.read.headScaleSlotStride + firstHead + thread);
      }
    }
    loadsCommit();
  }

  // Beta of the tokens, and on a flush of the committed records.
  __device__ void loadBeta(uint32_t base) const {
    const float* input = static_cast<const float*>(p.beta.data) + row * p.beta.rowStride;
#pragma unroll 1
    for (int index = warp; index < heads; index += Traits::kWarps) {
      const int head = firstHead + index;
      const float* ring = p.ringBeta + slot * p.ringBetaSlotStride + static_cast<int64_t>(head) * p.ringRows;
#pragma unroll 1
      for (int j = (flushes() ? 0 : pending) + lane; j < pending + tokens; j += 32) {
        wordLoad(base + layout.betaOffset + (index * layout.dtPitch + j) * 4,
                 j < pending ? ring + ringRow(j)
                             : input + head * p.beta.headStride + (j - pending) * p.beta.tokenStride);
      }
    }
  }

  // Products of the step's vectors with 16 records from `first` on, of `total`.
  __device__ void multiplyTile(float4* to, int first, int total) const {
    Vectors<Traits> q;
    q.load(keys() + pending * Traits::kKeyPitch, queries(), tokens, lane);
    float low[4], high[4] = {};
    keyDots<Traits>(low, keys(), first, total, q, 0, lane);
    if (first + 8 < total) keyDots<Traits>(high, keys(), first + 8, total, q, 0, lane);
    to[lane] = make_float4(low[0], low[1], high[0], high[1]);
  }

  // The key products a step needs, a tile of 16 records a warp: all records, on a flush of several tokens these alone. GDN
  // has the tokens in a tile of their own, the last.
  __device__ void multiplyKeys() const {
    const int total = pending + tokens;
    if constexpr (Traits::kGdn) {
      const int tiles = flushes() ? 0 : (pending + 15) / 16;
      for (int tile = warp; tile <= tiles; tile += Traits::kWarps) {
        if (tile < tiles) {
          multiplyTile(dots() + 32 * tile, 16 * tile, pending);
        } else {
          multiplyTile(tokenDots(), pending, total);
        }
      }
    } else {
      const int first = flushes() && !Traits::kPlain ? pending : 0;
      for (int tile = warp; first + 16 * tile < total; tile += Traits::kWarps) {
        multiplyTile(dots() + 32 * tile, first + 16 * tile, total);
      }
    }
  }

  // Where the product of a record and the only token's query is.
  __device__ const float* dotOf(int record) const {
    return reinterpret_cast<const float*>(dots() + record / 16 * 32 + record % 8 / 2) + record % 2 + record / 8 % 2 * 2;
  }

  __device__ float4* tokenDots() const { return dots() + (p.window + 15) / 16 * 32; }

  // This step's keys into ring rows h, h + 1, ...; nobody reads those now. `thread` of as many as there are pieces.
  __device__ void appendKeys(int thread) const {
    constexpr int kPieces = Traits::kStateDim / 8;
    if (firstHead <= group * p.headsPerGroup) {
      Act* ring = static_cast<Act*>(p.ringKey) + slot * p.ringKeySlotStride +
                  static_cast<int64_t>(group) * p.ringRows * Traits::kStateDim;
#pragma unroll 1
      for (int i = thread; i < tokens * kPieces; i += Traits::kThreads) {
        const int token = i / kPieces, piece = i % kPieces;
        *reinterpret_cast<uint4*>(ring + ringRow(pending + token) * Traits::kStateDim + piece * 8) =
            *reinterpret_cast<const uint4*>(keys() + (pending + token) * Traits::kKeyPitch + piece * 16);
      }
    }
  }

  // Likewise its step sizes, for GDN with beta.
  __device__ void appendHeads(int thread) const {
    if constexpr (Traits::kGdn) {
      float* ringBeta = p.ringBeta + slot * p.ringBetaSlotStride + static_cast<int64_t>(firstHead) * p.ringRows;
      for (int i = thread; i < heads * tokens; i += Traits::kThreads) {
        const int index = i / tokens, token = i % tokens;
        ringBeta[static_cast<int64_t>(index) * p.ringRows + ringRow(pending + token)] = beta(index)[pending + token];
      }
    }
    float* ringDt = p.ringDt + slot * p.ringDtSlotStride + static_cast<int64_t>(firstHead) * p.ringRows;
#pragma unroll 1
    for (int i = thread; i < heads * tokens; i += Traits::kThreads) {
      const int index = i / tokens, token = i % tokens;
      ringDt[static_cast<int64_t>(index) * p.ringRows + ringRow(pending + token)] = dt(index)[pending + token];
    }
  }

  // Lane (g, c) holds rows g and g + 8 of a slab and tokens 2c, 2c + 1 (GDN: vectors, the second of which is token c's
  // output); tokens from num_tokens on are written as zero.
  __device__ void writeOutput(int head, int slab, const float (&sum)[4]) const {
    Act* out = static_cast<Act*>(p.out) + row * p.outRowStride + head * p.outHeadStride + slab * 16 + lane / 4;
    if constexpr (Traits::kGdn) {
      writeToken(out, lane % 4, sum[1], sum[3]);
    } else {
#pragma unroll
      for (int e = 0; e < (Traits::kMaxTokens > 1 ? 2 : 1); ++e) {
        writeToken(out, 2 * (lane % 4) + e, sum[e], sum[2 + e]);
      }
    }
  }

  __device__ void writeToken(Act* out, int token, float low, float high) const {
    if (token >= p.tokens) return;
    uint16_t* at = reinterpret_cast<uint16_t*>(out + token * p.outTokenStride);
    at[0] = Activation<Act>::fromFloat(token < tokens ? low : 0.0f);
    at[8] = Activation<Act>::fromFloat(token < tokens ? high : 0.0f);
  }

  __device__ void writeZeros() const {
    const float zero[4] = {};
    for (int index = warp; index < heads; index += Traits::kWarps) {
#pragma unroll 1
      for (int slab = 0; slab < Traits::kSlabs; ++slab) writeOutput(firstHead + index, slab, zero);
    }
  }

  // What a head's committed records are read from: x, or GDN's corrections (16 bits as well).
  __device__ const Act* ringValues(int head) const {
    return static_cast<const Act*>(p.ringValue) + slot * p.ringValueSlotStride +
           static_cast<int64_t>(head) * p.ringRows * Traits::kHeadDim;
  }
  // Where a token's value is appended: x, or GDN's raw values.
  __device__ Act* ringInputs(int head) const {
    if constexpr (!Traits::kGdn) return const_cast<Act*>(ringValues(head));
    return static_cast<Act*>(p.ringV) + slot * p.ringVSlotStride +
           static_cast<int64_t>(head) * p.ringRows * Traits::kHeadDim;
  }
  __device__ const Act* tokenValues(int head) const {
    return static_cast<const Act*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride;
  }

  // Tokens' values from shared memory into the ring: `pieces` 16-byte pieces a row from column `first` on.
  __device__ void appendValues(int head, const char* values, int pitch, int first, int pieces) const {
    Act* ring = ringInputs(head) + first;
#pragma unroll 1
    for (int i = lane; i < tokens * pieces; i += 32) {
      const int token = i / pieces, piece = i % pieces;
      *reinterpret_cast<uint4*>(ring + static_cast<int64_t>(ringRow(pending + token)) * Traits::kHeadDim +
                                piece * 8) =
          *reinterpret_cast<const uint4*>(values + (pending + token) * pitch + piece * 16);
    }
  }
};

}  // namespace replayssm
