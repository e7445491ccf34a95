// The prompt scan of Mamba-2 (state-space duality): one CTA one or two heads of a group (or a share of a head's state
// rows), chunk after chunk.
//
//   o_t = exp(sum_{i<=t} l_i) S q_t + sum_{j<=t} <q_t, k_j> dt_j exp(sum_{j<i<=t} l_i) x_j + D x_t,   l = dt a
//   S  <- exp(sum l) S + sum_j dt_j exp(sum_{i>j} l_i) x_j k_j^T
//
// Two kinds of warps, one chunk apart. Helpers ask for a chunk's inputs, make its decay tables and its scores <q, k>,
// once for all heads of the CTA, and leave the scores weighed and split in the order in which they are read as
// operands. Meanwhile each state warp uses the chunk before: it needs only its own 16 rows of the state and of x.
// Committed records are a chunk without outputs.
#pragma once

#include "decay.cuh"
#include "state.cuh"

namespace replayssm {

template <class Act_, int kStateDim_, int kWarps_, int kHeads_>
struct Mamba2Prefill {
  using Act = Act_;
  static constexpr int kStateDim = kStateDim_;  // N
  static constexpr int kWarps = kWarps_;        // most state warps of a head
  static constexpr int kHeads = kHeads_;        // of a CTA, of one group
  using State = WarpState<kStateDim, 2, (kStateDim > 128)>;
  // Warps that help: two and what completes four, in which registers are dealt out.
  static constexpr int kHelpers = (kWarps * kHeads + 5) / 4 * 4 - kWarps * kHeads;
  static constexpr int kThreads = 32 * (kWarps * kHeads + kHelpers);
  static constexpr int kChunk = chunkTokens<Act, kStateDim>();
  static constexpr int kBlocks = kChunk / kBlockTokens;
  static constexpr int kKeyPitch = tilePitch(kStateDim), kValuePitch = tilePitch(16 * kWarps);
  static constexpr int kScorePairs = kBlocks * (kBlocks + 1) / 2;  // 16x16 blocks on and below the diagonal
  // A helper's blocks at a time.
  static constexpr int kScoreGroup = kStateDim * Parts<Act>::kCount > 128 ? 1 : 3;
  static constexpr int kScoreBytes = kScorePairs * 2 * 32 * 16;  // of a head and chunk
  static constexpr int kValueBytes = kChunk * kValuePitch;       // likewise

  // Shared memory, bytes from its beginning: contexts, the state warps' chunk counters, tables, vectors and scores of
  // two chunks, outputs, two stages of keys, queries, and x head by head.
  static constexpr int kCountersOffset = kHeads * kContextBytes;
  static constexpr int kTablesOffset = kCountersOffset + 64;
  static constexpr int kVectorsOffset = kTablesOffset + kHeads * sizeof(DecayTables<kChunk>);
  static constexpr int kScoresOffset = kVectorsOffset + 2 * kHeads * sizeof(DecayVectors<kChunk>);
  static constexpr int kOutputsOffset = kScoresOffset + 2 * kHeads * kScoreBytes;
  static constexpr int kStageOffset = kOutputsOffset + kHeads * kValueBytes;
  static constexpr int kQueriesOffset = kChunk * kKeyPitch;
  static constexpr int kValuesOffset = 2 * kQueriesOffset;
  static constexpr int kStageBytes = kValuesOffset + kHeads * kValueBytes;
  static constexpr int kSharedBytes = kStageOffset + 2 * kStageBytes;
};

// Shared memory of a CTA, as both kinds of warps see it.
template <class Traits>
struct Mamba2Shared {
  static constexpr int kChunk = Traits::kChunk;
  char* const base;

  __device__ HeadContext& context(int head) const {
    return *reinterpret_cast<HeadContext*>(base + head * kContextBytes);
  }
  // Of a state warp; the state leaves no register for it.
  __device__ int& counter(int place) const { return reinterpret_cast<int*>(base + Traits::kCountersOffset)[place]; }
  __device__ DecayTables<kChunk>& tables(int head) const {
    return reinterpret_cast<DecayTables<kChunk>*>(base + Traits::kTablesOffset)[head];
  }
  __device__ DecayVectors<kChunk>& vectors(int chunk, int head) const {
    return reinterpret_cast<DecayVectors<kChunk>*>(base + Traits::kVectorsOffset)[(chunk & 1) * Traits::kHeads + head];
  }
  // A lane's 16 bytes of a block's operands: leading and trailing parts of 8 tokens t.
  __device__ uint4* scores(int chunk, int head, int to, int from, int half, int lane) const {
    char* const at = base + Traits::kScoresOffset + ((chunk & 1) * Traits::kHeads + head) * Traits::kScoreBytes;
    return reinterpret_cast<uint4*>(at) + ((to * (to + 1) / 2 + from) * 2 + half) * 32 + lane;
  }
  __device__ uint32_t outputs(int head) const {
    return sharedAddress(base) + Traits::kOutputsOffset + head * Traits::kValueBytes;
  }
  __device__ uint32_t keys(int chunk) const {
    return sharedAddress(base) + Traits::kStageOffset + (chunk & 1) * Traits::kStageBytes;
  }
  __device__ uint32_t queries(int chunk) const { return keys(chunk) + Traits::kQueriesOffset; }
  __device__ uint32_t values(int chunk, int head) const {
    return keys(chunk) + Traits::kValuesOffset + head * Traits::kValueBytes;
  }
  __device__ Chunk chunk(int index) const { return Chunk::make(context(0).r, index, kChunk); }
  __device__ bool last(int index) const { return index + 1 == context(0).r.chunks(kChunk); }
};

// All warps of the CTA, or its helpers.
__device__ __forceinline__ void syncAll() { asm volatile("bar.sync 0, %0;" ::"r"(blockDim.x) : "memory"); }
template <int kHelpers>
__device__ __forceinline__ void syncHelpers() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kHelpers) : "memory");
}

template <class Traits>
struct Mamba2Helper {
  using Act = typename Traits::Act;
  static constexpr int kChunk = Traits::kChunk, kBlocks = Traits::kBlocks, kPitch = Traits::kKeyPitch;
  static constexpr int kHelpers = Traits::kHelpers;
  using Decays = LogDecays<kChunk>;

  const PrefillParams& p;
  const Mamba2Shared<Traits> shared;
  const int warp, lane, slabs;  // warp among the helpers; state warps of a head

  __device__ void loadChunk(int index) const {
    const Chunk c = shared.chunk(index);
    const int thread = warp * 32 + lane;
    const ChunkInput keys(shared.context(0), kKeys, c, p.ringRows);
    loadKeyTile<kChunk, Traits::kStateDim>(shared.keys(index), keys, c.count, thread, 32 * kHelpers);
    if (!c.pending) {
      const ChunkInput queries(shared.context(0), kQueries, c, p.ringRows);
      loadKeyTile<kChunk, Traits::kStateDim>(shared.queries(index), queries, c.count, thread, 32 * kHelpers);
    }
    for (int i = warp; i < slabs * Traits::kHeads; i += kHelpers) {
      const int head = i / slabs, slab = i % slabs;
      loadValueColumns<kChunk>(shared.values(index, head) + slab * 32, Traits::kValuePitch,
                               {shared.context(head), kValues, c, p.ringRows},
                               shared.context(head).rowsBegin + slab * 16, c.count, lane);
    }
  }

  __device__ void writeTables(int index, int head) const {
    const HeadContext& context = shared.context(head);
    const Chunk c = shared.chunk(index);
    const ChunkInput dt(context, kDecays, c, p.ringRows);
    Decays d;
#pragma unroll
    for (int word = 0; word < Decays::kWords; ++word) {
      const int token = lane + 32 * word;
      d.factor[word] = token < c.count ? dt.scalar(token) : 0.0f;
      d.log[word] = d.factor[word] > 0.0f ? d.factor[word] * context.rate : 0.0f;  // 0 * -infinity is not a number
    }
#pragma unroll 1
    for (int block = warp; block < kBlocks; block += kHelpers) {
      writeDecays<false>(shared.tables(head), shared.vectors(index, head), d, block, lane);
    }
  }

  // Blocks first, first + kHelpers, ... of the scores, together to hide their latencies.
  __device__ void writeScores(int index, int first) const {
    constexpr int kGroup = Traits::kScoreGroup;
    uint32_t q[kGroup], k[kGroup];
    int to[kGroup], from[kGroup];
    float sum[kGroup][2][4] = {};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int block = min(first + i * kHelpers, Traits::kScorePairs - 1);  // beyond the last: once more, not stored
      to[i] = (block >= 1) + (block >= 3) + (block >= 6);
      from[i] = block - to[i] * (to[i] + 1) / 2;
      q[i] = shared.queries(index) + to[i] * 16 * kPitch + rowsFirst(kPitch, lane);
      k[i] = shared.keys(index) + from[i] * 16 * kPitch + columnsFirst(kPitch, lane);
    }
#pragma unroll
    for (int step = 0; step < Traits::kStateDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        uint32_t raw[4], query[Parts<Act>::kCount][4], key[1][Parts<Act>::kCount][4];
        loadTiles(raw, q[i] + step * 32);
        splitActivations<Act>(query, raw);
        loadTiles(raw, k[i] + step * 32);
        splitActivations<Act>(key[0], raw);
        addProducts<2>(sum[i], query, key);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (first + i * kHelpers >= Traits::kScorePairs) break;
#pragma unroll
      for (int head = 0; head < Traits::kHeads; ++head) storeScores(index, head, to[i], from[i], sum[i]);
    }
  }

  __device__ void storeScores(int index, int head, int to, int from, const float (&raw)[2][4]) const {
    float weighed[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) weighed[e / 4][e % 4] = raw[e / 4][e % 4];
    const float one[2] = {1.0f, 1.0f};
    weighScores<kChunk>(weighed, shared.tables(head), to, from, one, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the tokens t
      uint32_t left[2], right[2];
      splitPair<2>(left, weighed[0][2 * half], weighed[0][2 * half + 1]);
      splitPair<2>(right, weighed[1][2 * half], weighed[1][2 * half + 1]);
      *shared.scores(index, head, to, from, half, lane) = make_uint4(left[0], right[0], left[1], right[1]);
    }
  }

  __device__ void prepare(int index) const {
    loadChunk(index);
    for (int head = 0; head < Traits::kHeads; ++head) writeTables(index, head);
    loadsDrain();
    syncHelpers<kHelpers>();
    if (shared.chunk(index).pending) return;
#pragma unroll 1
    for (int first = warp; first < Traits::kScorePairs; first += Traits::kScoreGroup * kHelpers) {
      writeScores(index, first);
    }
  }

  __device__ void run() const {
    prepare(0);
    syncAll();
#pragma unroll 1
    for (int i = 0; !shared.last(i); ++i) {
      prepare(i + 1);
      syncAll();
    }
  }
};

template <class Traits>
struct Mamba2State {
  using Act = typename Traits::Act;
  static constexpr int kChunk = Traits::kChunk, kBlocks = Traits::kBlocks, kPitch = Traits::kKeyPitch;
  static constexpr int kValuePitch = Traits::kValuePitch;

  const PrefillParams& p;
  const Mamba2Shared<Traits> shared;
  const int head, slab, lane;

  // Index of the chunk in hand.
  __device__ int& counter() const { return shared.counter(head * Traits::kWarps + slab); }

  // out[tile][e]: outputs of tokens 8 tile.. for the warp's rows.
  __device__ void outputs(float (&out)[kChunk / 8][4], const typename Traits::State& state, int index, uint32_t x,
                          const DecayVectors<kChunk>& decay, float skip) const {
    const uint32_t q = shared.queries(index) + columnsFirst(kPitch, lane);
    state.template operands<2>([&](int step, const uint32_t (&part)[2][4]) {
      constexpr int kTogether = kBlocks / Parts<Act>::kCount;
#pragma unroll
      for (int first = 0; first < kBlocks; first += kTogether) {
        uint32_t query[kTogether][Parts<Act>::kCount][4];
#pragma unroll
        for (int b = 0; b < kTogether; ++b) {
          uint32_t raw[4];
          loadTiles(raw, q + (first + b) * 16 * kPitch + step * 32);
          splitActivations<Act>(query[b], raw);
        }
        addProducts<2>(&out[2 * first], part, query);
      }
    });
#pragma unroll
    for (int tile = 0; tile < kChunk / 8; ++tile) {
      const float2 w = *reinterpret_cast<const float2*>(&decay.before[8 * tile + 2 * (lane % 4)]);
#pragma unroll
      for (int e = 0; e < 4; ++e) out[tile][e] *= e & 1 ? w.y : w.x;
    }
#pragma unroll
    for (int from = 0; from < kBlocks; ++from) {
      uint32_t raw[4], value[Parts<Act>::kCount][4];
      loadTilesTransposed(raw, x + from * 16 * kValuePitch);
      splitActivations<Act>(value, raw);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float* o = &out[2 * from + e / 2][e % 2 * 2];
        o[0] = fmaf(skip, Activation<Act>::low(raw[e]), o[0]);
        o[1] = fmaf(skip, Activation<Act>::high(raw[e]), o[1]);
      }
      int to = from;
#pragma unroll
      for (; to + 1 < kBlocks; to += 2) addScores<2>(out, value, index, to, from);
      if (to < kBlocks) addScores<1>(out, value, index, to, from);
    }
  }

  // Blocks of tokens t two at a time: four independent sums.
  template <int kTogether>
  __device__ void addScores(float (&out)[kChunk / 8][4], const uint32_t (&value)[Parts<Act>::kCount][4], int index,
                            int to, int from) const {
    uint32_t w[kTogether][2][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) loadWeights(w[i], shared.scores(index, head, to + i, from, 0, lane));
    addProducts<2>(&out[2 * to], value, w);
  }

  // Adds the chunk to the state, few blocks of tokens at a time to spare registers.
  __device__ void advance(typename Traits::State& state, uint32_t keys, uint32_t x,
                          const DecayVectors<kChunk>& decay) const {
    constexpr int kSteps = Traits::kStateDim > 128 && Parts<Act>::kCount == 1 ? 1 : 2;
#pragma unroll
    for (int first = 0; first < kBlocks; first += kSteps) {
      uint32_t part[kSteps][3][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int block = first + step;
        uint32_t raw[4];
        loadTilesTransposed(raw, x + block * 16 * kValuePitch);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 w = *reinterpret_cast<const float2*>(&decay.after[16 * block + e / 2 * 8 + 2 * (lane % 4)]);
          uint32_t one[3];
          splitPair<3>(one, w.x * Activation<Act>::low(raw[e]), w.y * Activation<Act>::high(raw[e]));
#pragma unroll
          for (int i = 0; i < 3; ++i) part[step][i][e] = one[i];
        }
      }
      state.template advance<Act>(first == 0 ? decay.total : 1.0f, part, keys + first * 16 * kPitch, lane);
    }
  }

  __device__ void useChunk(typename Traits::State& state, int index) const {
    const DecayVectors<kChunk>& decay = shared.vectors(index, head);
    const uint32_t x = shared.values(index, head) + slab * 32 + columnsFirst(kValuePitch, lane);
    if (!shared.chunk(index).pending) {
      const HeadContext& context = shared.context(head);
      float out[kChunk / 8][4] = {};
      outputs(out, state, index, x, decay, context.skip);
      const uint32_t columns = shared.outputs(head) + slab * 32;
      __syncwarp();
      storePacked<Act>(out, columns + columnsFirst(kValuePitch, lane), kValuePitch);
      __syncwarp();
      storeOutputs<kChunk>(p, columns, kValuePitch, context, context.rowsBegin + slab * 16, shared.chunk(index),
                           lane);
    }
    advance(state, shared.keys(index), x, decay);
  }
};

// State warps of a head.
template <class Traits>
__device__ __forceinline__ int slabsOf() {
  return (blockDim.x / 32 - Traits::kHelpers) / Traits::kHeads;
}

// The thread's part of a CTA, anew.
template <class Traits>
__device__ __forceinline__ Mamba2State<Traits> renewedState(const PrefillParams& p, char* shared) {
  const int thread = renewedThread(reinterpret_cast<const HeadContext*>(shared)->zero);
  const int warp = thread / 32, slabs = slabsOf<Traits>();
  const int head = Traits::kHeads == 1 ? 0 : warp >= slabs;
  return {p, {shared}, head, warp - head * slabs, thread % 32};
}

template <class Traits>
__device__ __forceinline__ void runState(const PrefillParams& p, char* base) {
  const Mamba2Shared<Traits> shared{base};
  typename Traits::State state;
  {
    const Mamba2State<Traits> begin = renewedState<Traits>(p, base);
    const HeadContext& context = shared.context(begin.head);
    readState(state, p, context, context.rowsBegin + begin.slab * 16, begin.lane);
    begin.counter() = 0;
  }
  syncAll();
  while (true) {
    {
      const Mamba2State<Traits> part = renewedState<Traits>(p, base);
      part.useChunk(state, part.counter());
    }
    int& counter = renewedState<Traits>(p, base).counter();
    const int index = counter;
    if (shared.last(index)) break;
    __syncwarp();
    counter = index + 1;
    syncAll();
  }
  const Mamba2State<Traits> end = renewedState<Traits>(p, base);
  const HeadContext& context = shared.context(end.head);
  writeState(state, p, context, context.rowsBegin + end.slab * 16, end.lane);
}

// Grid: heads / kHeads * splits, rows.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    mamba2PrefillKernel(const __grid_constant__ PrefillParams p) {
  static_assert(Traits::kHeads == 1 || Traits::kHeads == 2, "renewedState tells two heads apart");
  extern __shared__ __align__(128) char shared[];
  const int first = blockIdx.x / p.splits * Traits::kHeads, row = blockIdx.y;
  const int slabs = slabsOf<Traits>(), rowsBegin = blockIdx.x % p.splits * slabs * 16;
  const PromptRow r = PromptRow::load(p, row);
  for (int head = 0; head < Traits::kHeads; ++head) storeZeros(p, row, first + head, rowsBegin, slabs * 16, r.tokens);
  if (r.slot < 0) return;
  if (threadIdx.x < Traits::kHeads) {
    Mamba2Shared<Traits>{shared}.context(threadIdx.x).fill(p, r, row, first + threadIdx.x, rowsBegin, false);
  }
  __syncthreads();
  const int helper = static_cast<int>(threadIdx.x / 32) - slabs * Traits::kHeads;
  if (helper >= 0) {
    Mamba2Helper<Traits>{p, {shared}, helper, static_cast<int>(threadIdx.x % 32), slabs}.run();
  } else {
    runState<Traits>(p, shared);
  }
}

}  // namespace replayssm
