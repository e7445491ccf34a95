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
  static constexpr int kChunk = chunkTokens<kStateDim>();
  static constexpr int kBlocks = kChunk / kBlockTokens;
  static constexpr int kKeyPitch = tilePitch(kStateDim);
  static constexpr int kScorePairs = kBlocks * (kBlocks + 1) / 2;  // 16x16 blocks on and below the diagonal

  // Shared memory, bytes from its beginning. A stage: keys, queries, x.
  static constexpr int kTablesOffset = 0;
  static constexpr int kVectorsOffset = kTablesOffset + sizeof(DecayTables<kChunk>);
  static constexpr int kScoresOffset = kVectorsOffset + 2 * sizeof(DecayVectors<kChunk>);
  static constexpr int kStageOffset = kScoresOffset + kScorePairs * 2 * 32 * 16;
  static constexpr __host__ __device__ int valuesOffset() { return 2 * kChunk * kKeyPitch; }
  static constexpr __host__ __device__ int stageBytes(int headDim) {
    return valuesOffset() + kChunk * tilePitch(headDim);
  }
  static constexpr __host__ __device__ int sharedBytes(int headDim, int stages) {
    return kStageOffset + stages * stageBytes(headDim);
  }
};

template <class Traits>
struct Mamba2Scan {
  using Act = typename Traits::Act;
  static constexpr int kChunk = Traits::kChunk, kBlocks = Traits::kBlocks, kPitch = Traits::kKeyPitch;
  using Decays = LogDecays<kChunk>;

  const PrefillParams& p;
  char* const shared;
  const PromptRow r;
  const int row, head, group, rowsBegin, rowsHere, warp, lane;  // the CTA's state rows of the head

  __device__ DecayTables<kChunk>& tables() const {
    return *reinterpret_cast<DecayTables<kChunk>*>(shared + Traits::kTablesOffset);
  }
  __device__ DecayVectors<kChunk>& vectors(int chunk) const {
    return reinterpret_cast<DecayVectors<kChunk>*>(shared + Traits::kVectorsOffset)[chunk & 1];
  }
  __device__ uint4* scores(int to, int from, int half) const {
    return reinterpret_cast<uint4*>(shared + Traits::kScoresOffset) + ((to * (to + 1) / 2 + from) * 2 + half) * 32 + lane;
  }
  __device__ char* stage(int chunk) const {
    return shared + Traits::kStageOffset + (p.stages == 2 ? chunk & 1 : 0) * Traits::stageBytes(rowsHere);
  }

  __device__ void loadChunk(int index) const {
    const Chunk c = Chunk::make(r, index, kChunk);
    const uint32_t at = sharedAddress(stage(index));
    TokenSource k, x;
    if (c.pending) {
      k = TokenSource::record(p.ringKey, p.ringKeySlotStride, r, group, p.ringRows, p.stateDim, c, 2);
      x = TokenSource::record(p.ringValue, p.ringValueSlotStride, r, head, p.ringRows, p.headDim, c, 2);
    } else {
      k = TokenSource::prompt(p.k, row, group, c, 2);
      x = TokenSource::prompt(p.value, row, head, c, 2);
      TokenSource q = TokenSource::prompt(p.q, row, group, c, 2);
      loadTile<kChunk>(at + kChunk * kPitch, kPitch, q, 0, Traits::kStateDim, c.count);
    }
    loadTile<kChunk>(at, kPitch, k, 0, Traits::kStateDim, c.count);
    loadTile<kChunk>(at + Traits::valuesOffset(), tilePitch(rowsHere), x, rowsBegin, rowsHere, c.count);
  }

  __device__ Decays loadDecays(int index) const {
    const Chunk c = Chunk::make(r, index, kChunk);
    const TokenSource dt = c.pending
                               ? TokenSource::record(p.ringDt, p.ringDtSlotStride, r, head, p.ringRows, 1, c, 4)
                               : TokenSource::prompt(p.dt, row, head, c, 4);
    Decays d;
#pragma unroll
    for (int word = 0; word < Decays::kWords; ++word) {
      const int token = lane + 32 * word;
      d.factor[word] = token < c.count ? dt.scalar(token) : 0.0f;
    }
    return d;
  }

  __device__ void writeTables(Decays d, float a, int chunk) const {
#pragma unroll
    for (int word = 0; word < Decays::kWords; ++word) {
      d.log[word] = d.factor[word] > 0.0f ? d.factor[word] * a : 0.0f;  // 0 * -infinity is not a number
    }
    for (int block = warp; block < kBlocks; block += blockDim.x / 32) {
      writeDecays<kChunk>(tables(), vectors(chunk), d, block, lane);
    }
  }

  // Block `to`, `from` of the scores as operands: for each half of 8 tokens t, leading and trailing parts.
  __device__ void scoreBlock(uint32_t keys, int to, int from) const {
    const uint32_t q = keys + kChunk * kPitch + to * 16 * kPitch + rowsFirst(kPitch, lane);
    const uint32_t k = keys + from * 16 * kPitch + columnsFirst(kPitch, lane);
    float sum[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < Traits::kStateDim / 16; ++step) {
      uint32_t raw[4], query[Parts<Act>::kCount][4], key[1][Parts<Act>::kCount][4];
      loadTiles(raw, q + step * 32);
      splitActivations<Act>(query, raw);
      loadTiles(raw, k + step * 32);
      splitActivations<Act>(key[0], raw);
      addProducts<2>(sum[step & 1], query, key);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[0][half][e] += sum[1][half][e];
    }
    const float one[2] = {1.0f, 1.0f};
    weighScores<kChunk>(sum[0], tables(), to, from, one, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the tokens t
      uint32_t left[2], right[2];
      splitPair<2>(left, sum[0][0][2 * half], sum[0][0][2 * half + 1]);
      splitPair<2>(right, sum[0][1][2 * half], sum[0][1][2 * half + 1]);
      *scores(to, from, half) = make_uint4(left[0], right[0], left[1], right[1]);
    }
  }

  __device__ void scoreBlocks(uint32_t keys) const {
    int block = 0;
    for (int to = 0; to < kBlocks; ++to) {
      for (int from = 0; from <= to; ++from, ++block) {
        if (block % (blockDim.x / 32) == warp) scoreBlock(keys, to, from);
      }
    }
  }

  // out[tile][e]: outputs of tokens 8 tile.. for the warp's rows.
  __device__ void outputs(float (&out)[kChunk / 8][4], const WarpState<Traits::kStateDim>& state, uint32_t keys,
                          uint32_t x, const DecayVectors<kChunk>& decay, float skip) const {
    const uint32_t q = keys + kChunk * kPitch + columnsFirst(kPitch, lane);
    state.template operands<2>([&](int step, const uint32_t (&part)[2][4]) {
      uint32_t query[kBlocks][Parts<Act>::kCount][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        uint32_t raw[4];
        loadTiles(raw, q + b * 16 * kPitch + step * 32);
        splitActivations<Act>(query[b], raw);
      }
      addProducts<2>(out, part, query);
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
      loadTilesTransposed(raw, x + from * 16 * tilePitch(rowsHere));
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
        const uint32_t weight[1][2][4] = {{{first.x, first.y, second.x, second.y}, {first.z, first.w, second.z, second.w}}};
        addProducts<2>(&out[2 * to], value, weight);
      }
    }
  }

  // The weighted values of the chunk's tokens, in parts.
  __device__ void weighValues(uint32_t (&part)[kBlocks][3][4], uint32_t x, const DecayVectors<kChunk>& decay) const {
#pragma unroll
    for (int step = 0; step < kBlocks; ++step) {
      uint32_t raw[4];
      loadTilesTransposed(raw, x + step * 16 * tilePitch(rowsHere));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 w =
            *reinterpret_cast<const float2*>(&decay.after[16 * step + e / 2 * 8 + 2 * (lane % 4)]);
        uint32_t one[3];
        splitPair<3>(one, w.x * Activation<Act>::low(raw[e]), w.y * Activation<Act>::high(raw[e]));
#pragma unroll
        for (int i = 0; i < 3; ++i) part[step][i][e] = one[i];
      }
    }
  }

  // After the barrier that ends the score phase.
  __device__ void useChunk(WarpState<Traits::kStateDim>& state, int index, float skip) const {
    const Chunk c = Chunk::make(r, index, kChunk);
    const DecayVectors<kChunk>& decay = vectors(index);
    const int pitch = tilePitch(rowsHere);
    char* const values = stage(index) + Traits::valuesOffset();
    const uint32_t keys = sharedAddress(stage(index));
    const uint32_t x = sharedAddress(values) + warp * 32 + columnsFirst(pitch, lane);
    uint32_t packed[kBlocks][4];
    if (!c.pending) {
      float out[kChunk / 8][4] = {};
      outputs(out, state, keys, x, decay, skip);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* o = &out[2 * b + e / 2][e % 2 * 2];
          packed[b][e] = Activation<Act>::fromFloat(o[0]) | static_cast<uint32_t>(Activation<Act>::fromFloat(o[1])) << 16;
        }
      }
    }
    {
      uint32_t part[kBlocks][3][4];
      weighValues(part, x, decay);
      state.template advance<Act>(decay.total, part, keys, lane);
    }
    if (c.pending) return;
    __syncwarp();  // the warp's columns of x make room for its outputs
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) storeTilesTransposed(x + b * 16 * pitch, packed[b]);
    __syncwarp();
    storeOutputs<kChunk>(p, values, pitch, row, head, warp * 16, rowsBegin + warp * 16, c, lane);
  }

  __device__ void run() const {
    const int chunks = r.chunks(kChunk);
    const float a = p.a[head], skip = p.skip == nullptr ? 0.0f : p.skip[head];
    WarpState<Traits::kStateDim> state;
    loadChunk(0);
    writeTables(loadDecays(0), a, 0);
    readState(state, p, r, row, head, rowsBegin + warp * 16, lane);
    for (int i = 0; i < chunks; ++i) {
      loadsDrain();
      __syncthreads();
      const bool more = i + 1 < chunks;
      Decays next{};
      if (more) next = loadDecays(i + 1);
      if (more && p.stages == 2) loadChunk(i + 1);
      if (!Chunk::make(r, i, kChunk).pending) scoreBlocks(sharedAddress(stage(i)));
      __syncthreads();
      if (more) writeTables(next, a, i + 1);
      useChunk(state, i, skip);
      if (more && p.stages == 1) {
        __syncthreads();
        loadChunk(i + 1);
      }
    }
    writeState(state, p, r, row, head, rowsBegin + warp * 16, lane);
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
  if (r.slot >= 0) {
    Mamba2Scan<Traits>{p, shared, r, row, head, head / p.headsPerGroup, rowsBegin, rowsHere,
                       static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)}
        .run();
  }
  storeZeros(p, row, head, rowsBegin, rowsHere, r.tokens);
}

}  // namespace replayssm
