// The prompt scan of Mamba-2 (state-space duality): one CTA a head (or a share of its state rows), chunk after chunk.
//
//   o_t = exp(sum_{i<=t} l_i) S q_t + sum_{j<=t} <q_t, k_j> dt_j exp(sum_{j<i<=t} l_i) x_j + D x_t,   l = dt a
//   S  <- exp(sum l) S + sum_j dt_j exp(sum_{i>j} l_i) x_j k_j^T
//
// All warps compute scores <q, k> and leave them, weighed and split, in shared memory in the order in which they are
// read as operands; then each warp needs only its own 16 rows of the state and of x. Committed records are a chunk
// without outputs.
#pragma once

#include "decay.cuh"
#include "state.cuh"

namespace replayssm {

template <class Act_, int kStateDim_, int kWarps_, int kResident_>
struct Mamba2Prefill {
  using Act = Act_;
  static constexpr int kStateDim = kStateDim_;  // N
  static constexpr int kWarps = kWarps_;        // most warps of a CTA
  static constexpr int kResident = kResident_;  // CTAs a multiprocessor shall hold
  static constexpr int kChunk = chunkTokens<Act, kStateDim>();
  static constexpr int kBlocks = kChunk / kBlockTokens;
  static constexpr int kKeyPitch = tilePitch(kStateDim), kValuePitch = tilePitch(16 * kWarps);
  static constexpr int kScorePairs = kBlocks * (kBlocks + 1) / 2;  // 16x16 blocks on and below the diagonal
  static constexpr int kScoreGroup = (kScorePairs + kWarps - 1) / kWarps;

  // Shared memory, bytes from its beginning; the context comes first. A stage: keys, queries, x.
  static constexpr int kTablesOffset = kContextBytes;
  static constexpr int kVectorsOffset = kTablesOffset + sizeof(DecayTables<kChunk>);
  static constexpr int kScoresOffset = kVectorsOffset + 2 * sizeof(DecayVectors<kChunk>);
  static constexpr int kOutputsOffset = kScoresOffset + kScorePairs * 2 * 32 * 16;
  static constexpr int kStageOffset = kOutputsOffset + kChunk * kValuePitch;
  static constexpr int kQueriesOffset = kChunk * kKeyPitch;
  static constexpr int kValuesOffset = 2 * kQueriesOffset;
  static constexpr int kStageBytes = kValuesOffset + kChunk * kValuePitch;
  static constexpr int kOneStage = kStageOffset + kStageBytes, kTwoStages = kOneStage + kStageBytes;
};

template <class Traits>
struct Mamba2Scan {
  using Act = typename Traits::Act;
  static constexpr int kChunk = Traits::kChunk, kBlocks = Traits::kBlocks, kPitch = Traits::kKeyPitch;
  using Decays = LogDecays<kChunk>;

  const PrefillParams& p;
  char* const shared;
  const int thread;
  const int warp = thread / 32, lane = thread % 32;

  __device__ __forceinline__ Mamba2Scan renewed() const { return {p, shared, renewedThread()}; }

  __device__ const HeadContext& context() const { return *reinterpret_cast<const HeadContext*>(shared); }
  __device__ Chunk chunk(int index) const { return Chunk::make(context().r, index, kChunk); }
  __device__ DecayTables<kChunk>& tables() const {
    return *reinterpret_cast<DecayTables<kChunk>*>(shared + Traits::kTablesOffset);
  }
  __device__ DecayVectors<kChunk>& vectors(int chunk) const {
    return reinterpret_cast<DecayVectors<kChunk>*>(shared + Traits::kVectorsOffset)[chunk & 1];
  }
  __device__ uint4* scores(int to, int from, int half) const {
    const int block = to * (to + 1) / 2 + from;
    return reinterpret_cast<uint4*>(shared + Traits::kScoresOffset) + (block * 2 + half) * 32 + lane;
  }
  __device__ char* stage(int chunk) const {
    return shared + Traits::kStageOffset + (p.stages == 2 ? chunk & 1 : 0) * Traits::kStageBytes;
  }

  __device__ void loadChunk(int index) const {
    const Chunk c = chunk(index);
    const uint32_t at = sharedAddress(stage(index));
    loadKeyTile<kChunk, Traits::kStateDim>(at, {context(), kKeys, c, p.ringRows}, c.count, thread);
    if (!c.pending) {
      const ChunkInput queries(context(), kQueries, c, p.ringRows);
      loadKeyTile<kChunk, Traits::kStateDim>(at + Traits::kQueriesOffset, queries, c.count, thread);
    }
    loadValueTile<kChunk>(at + Traits::kValuesOffset, Traits::kValuePitch, {context(), kValues, c, p.ringRows},
                          context().rowsBegin, c.count, thread);
  }

  __device__ Decays loadDecays(int index) const {
    const Chunk c = chunk(index);
    const ChunkInput dt(context(), kDecays, c, p.ringRows);
    Decays d;
#pragma unroll
    for (int word = 0; word < Decays::kWords; ++word) {
      const int token = lane + 32 * word;
      d.factor[word] = token < c.count ? dt.scalar(token) : 0.0f;
    }
    return d;
  }

  __device__ void writeTables(Decays d, int chunk) const {
    const float a = context().rate;
#pragma unroll
    for (int word = 0; word < Decays::kWords; ++word) {
      d.log[word] = d.factor[word] > 0.0f ? d.factor[word] * a : 0.0f;  // 0 * -infinity is not a number
    }
#pragma unroll 1
    for (int block = warp; block < kBlocks; block += blockDim.x / 32) {
      writeDecays<false>(tables(), vectors(chunk), d, block, lane);
    }
  }

  // Blocks first, first + stride, ... of the scores as operands, together to hide their latencies: for each half of 8
  // tokens t, leading and trailing parts.
  __device__ void scoreGroup(uint32_t keys, int first, int stride) const {
    constexpr int kGroup = Traits::kScoreGroup;
    uint32_t q[kGroup], k[kGroup];
    int to[kGroup], from[kGroup];
    float sum[kGroup][2][4] = {};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int block = min(first + i * stride, Traits::kScorePairs - 1);  // beyond the last: once more, not stored
      to[i] = (block >= 1) + (block >= 3) + (block >= 6);
      from[i] = block - to[i] * (to[i] + 1) / 2;
      q[i] = keys + Traits::kQueriesOffset + to[i] * 16 * kPitch + rowsFirst(kPitch, lane);
      k[i] = keys + from[i] * 16 * kPitch + columnsFirst(kPitch, lane);
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
      if (first + i * stride >= Traits::kScorePairs) break;
      const float one[2] = {1.0f, 1.0f};
      weighScores<kChunk>(sum[i], tables(), to[i], from[i], one, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the tokens t
        uint32_t left[2], right[2];
        splitPair<2>(left, sum[i][0][2 * half], sum[i][0][2 * half + 1]);
        splitPair<2>(right, sum[i][1][2 * half], sum[i][1][2 * half + 1]);
        *scores(to[i], from[i], half) = make_uint4(left[0], right[0], left[1], right[1]);
      }
    }
  }

  __device__ void scoreBlocks(uint32_t keys) const {
    const int warps = blockDim.x / 32;
#pragma unroll 1
    for (int first = warp; first < Traits::kScorePairs; first += Traits::kScoreGroup * warps) {
      scoreGroup(keys, first, warps);
    }
  }

  // out[tile][e]: outputs of tokens 8 tile.. for the warp's rows.
  __device__ void outputs(float (&out)[kChunk / 8][4], const WarpState<Traits::kStateDim>& state, uint32_t keys,
                          uint32_t x, const DecayVectors<kChunk>& decay, float skip) const {
    const uint32_t q = keys + Traits::kQueriesOffset + columnsFirst(kPitch, lane);
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
      loadTilesTransposed(raw, x + from * 16 * Traits::kValuePitch);
      splitActivations<Act>(value, raw);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float* o = &out[2 * from + e / 2][e % 2 * 2];
        o[0] = fmaf(skip, Activation<Act>::low(raw[e]), o[0]);
        o[1] = fmaf(skip, Activation<Act>::high(raw[e]), o[1]);
      }
#pragma unroll
      for (int to = from; to < kBlocks; ++to) {
        const uint4 first = *scores(to, from, 0), second = *scores(to, from, 1);
        const uint32_t weight[1][2][4] = {{{first.x, first.y, second.x, second.y},
                                           {first.z, first.w, second.z, second.w}}};
        addProducts<2>(&out[2 * to], value, weight);
      }
    }
  }

  // Adds the chunk to the state, few blocks of tokens at a time to spare registers.
  __device__ void advance(WarpState<Traits::kStateDim>& state, uint32_t keys, uint32_t x,
                          const DecayVectors<kChunk>& decay) const {
    constexpr int kSteps = Traits::kStateDim > 128 && Parts<Act>::kCount == 1 ? 1 : 2;
#pragma unroll
    for (int first = 0; first < kBlocks; first += kSteps) {
      uint32_t part[kSteps][3][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int block = first + step;
        uint32_t raw[4];
        loadTilesTransposed(raw, x + block * 16 * Traits::kValuePitch);
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

  // After the barrier that ends the score phase.
  __device__ void useChunk(WarpState<Traits::kStateDim>& state, int index) const {
    const Chunk c = chunk(index);
    const DecayVectors<kChunk>& decay = vectors(index);
    constexpr int kValuePitch = Traits::kValuePitch;
    const uint32_t keys = sharedAddress(stage(index));
    const uint32_t x = keys + Traits::kValuesOffset + warp * 32 + columnsFirst(kValuePitch, lane);
    if (!c.pending) {
      float out[kChunk / 8][4] = {};
      outputs(out, state, keys, x, decay, context().skip);
      const uint32_t columns = sharedAddress(shared) + Traits::kOutputsOffset + warp * 32;
      storePacked<Act>(out, columns + columnsFirst(kValuePitch, lane), kValuePitch);
      __syncwarp();
      storeOutputs<kChunk>(p, columns, kValuePitch, context(), context().rowsBegin + warp * 16, c, lane);
    }
    advance(state, keys, x, decay);
  }

  __device__ bool last(int index) const { return index + 1 == context().r.chunks(kChunk); }

  __device__ void run() const {
    WarpState<Traits::kStateDim> state;
    loadChunk(0);
    renewed().writeTables(loadDecays(0), 0);
    {
      const Mamba2Scan begin = renewed();
      readState(state, p, context(), context().rowsBegin + begin.warp * 16, begin.lane);
    }
#pragma unroll 1
    for (int i = 0;; ++i) {
      loadsDrain();
      __syncthreads();
      Decays next{};
      if (!last(i)) next = renewed().loadDecays(i + 1);
      if (!last(i) && p.stages == 2) renewed().loadChunk(i + 1);
      if (!chunk(i).pending) renewed().scoreBlocks(sharedAddress(stage(i)));
      __syncthreads();
      if (!last(i)) renewed().writeTables(next, i + 1);
      renewed().useChunk(state, i);
      if (last(i)) break;
      if (p.stages == 1) {
        __syncthreads();
        renewed().loadChunk(i + 1);
      }
    }
    const Mamba2Scan end = renewed();
    writeState(state, p, context(), context().rowsBegin + end.warp * 16, end.lane);
  }
};

// Grid: heads * splits, rows.
template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kWarps, Traits::kResident)
    mamba2PrefillKernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(128) char shared[];
  const int head = blockIdx.x / p.splits, row = blockIdx.y;
  const int rowsHere = blockDim.x / 2, rowsBegin = blockIdx.x % p.splits * rowsHere;
  const PromptRow r = PromptRow::load(p, row);
  storeZeros(p, row, head, rowsBegin, rowsHere, r.tokens);
  if (r.slot < 0) return;
  if (threadIdx.x == 0) reinterpret_cast<HeadContext*>(shared)->fill(p, r, row, head, rowsBegin, false);
  __syncthreads();
  Mamba2Scan<Traits>{p, shared, static_cast<int>(threadIdx.x)}.run();
}

}  // namespace replayssm
