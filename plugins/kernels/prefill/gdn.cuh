// Second kernel of the GDN prompt scan: one CTA a head (or a share of its state rows), chunk after chunk.
//
//   u = (I + L)^-1 diag(beta) (v - exp(sum_{i<=t} g_i) S k_t)        the chunk's corrections
//   o_t = exp(sum_{i<=t} g_i) S q_t + sum_{j<=t} <q_t, k_j> exp(sum_{j<i<=t} g_i) u_j
//   S <- exp(sum g) S + sum_j exp(sum_{i>j} g_i) u_j k_j^T
//
// A warp keeps 16 rows of the state and all that follows from them in registers; it shares only inputs with other
// warps. What enters the state is split into three parts, exact to 2^-24; outputs use two. Committed records are a
// chunk without outputs, whose corrections come from the ring.
#pragma once

#include "gdn_record.cuh"
#include "state.cuh"

namespace replayssm {

template <class Act_, int kStateDim_, int kWarps_>
struct GdnPrefill {
  using Act = Act_;
  static constexpr int kStateDim = kStateDim_;
  static constexpr int kWarps = kWarps_;  // most warps of a CTA
  static constexpr int kChunk = chunkTokens<Act, kStateDim>();
  static constexpr int kBlocks = kChunk / kBlockTokens;
  static constexpr int kKeyPitch = tilePitch(kStateDim), kValuePitch = tilePitch(16 * kWarps);

  // A stage of shared memory: keys, queries, the record, values.
  static constexpr int kQueriesOffset = kChunk * kKeyPitch;
  static constexpr int kRecordOffset = 2 * kChunk * kKeyPitch;
  static constexpr int kValuesOffset = kRecordOffset + sizeof(GdnRecord<kChunk>);
  static constexpr int kStageBytes = kValuesOffset + kChunk * kValuePitch;
  static constexpr int kOneStage = kContextBytes + kStageBytes, kTwoStages = kOneStage + kStageBytes;
};

template <class Traits>
struct GdnScan {
  using Act = typename Traits::Act;
  static constexpr int kChunk = Traits::kChunk, kBlocks = Traits::kBlocks, kPitch = Traits::kKeyPitch;
  using Record = GdnRecord<kChunk>;
  using Rows = float[kChunk / 8][4];  // the warp's 16 elements of 8 tokens a tile

  const PrefillParams& p;
  char* const shared;
  const int thread;
  const int warp = thread / 32, lane = thread % 32;

  __device__ __forceinline__ GdnScan renewed() const { return {p, shared, renewedThread()}; }

  __device__ const HeadContext& context() const { return *reinterpret_cast<const HeadContext*>(shared); }
  __device__ char* stage(int chunk) const {
    return shared + kContextBytes + (p.stages == 2 ? chunk & 1 : 0) * Traits::kStageBytes;
  }

  __device__ void loadChunk(int index) const {
    const Chunk c = Chunk::make(context().r, index, kChunk);
    const uint32_t at = sharedAddress(stage(index));
    loadKeyTile<kChunk, Traits::kStateDim>(at, {context(), kKeys, c, p.ringRows}, c.count, thread);
    if (!c.pending) {
      const ChunkInput queries(context(), kQueries, c, p.ringRows);
      loadKeyTile<kChunk, Traits::kStateDim>(at + Traits::kQueriesOffset, queries, c.count, thread);
    }
    loadValueTile<kChunk>(at + Traits::kValuesOffset, Traits::kValuePitch, {context(), kValues, c, p.ringRows},
                          context().rowsBegin, c.count, thread);
    const char* record = reinterpret_cast<const char*>(recordOf<kChunk>(p, context().row, index, context().head));
#pragma unroll 1
    for (int i = recordBegin<kChunk>(c.pending) + thread * 16; i < recordEnd<kChunk>(); i += blockDim.x * 16) {
      pieceLoad(at + Traits::kRecordOffset + i, record + i);
    }
  }

  // recalled += S k, out += S q for all tokens of the chunk.
  __device__ void readOut(Rows& recalled, Rows& out, const WarpState<Traits::kStateDim>& state, uint32_t keys) const {
    const uint32_t k = keys + columnsFirst(kPitch, lane), q = k + Traits::kQueriesOffset;
    state.template operands<3>([&](int step, const uint32_t (&part)[3][4]) {
      constexpr int kTogether = Traits::kStateDim > 128 ? 1 : 2;  // blocks, for registers
#pragma unroll
      for (int b = 0; b < kBlocks; b += kTogether) {
        uint32_t key[kTogether][Parts<Act>::kCount][4], query[kTogether][Parts<Act>::kCount][4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          uint32_t raw[4];
          loadTiles(raw, k + (b + i) * 16 * kPitch + step * 32);
          splitActivations<Act>(key[i], raw);
          loadTiles(raw, q + (b + i) * 16 * kPitch + step * 32);
          splitActivations<Act>(query[i], raw);
        }
        addProducts<3>(&recalled[2 * b], part, key);
        addProducts<2>(&out[2 * b], part, query);
      }
    });
  }

  // tile *= factor of its tokens.
  __device__ static void scaleTokens(Rows& rows, const float* factor, int lane) {
#pragma unroll
    for (int tile = 0; tile < kChunk / 8; ++tile) {
      const float2 w = *reinterpret_cast<const float2*>(factor + 8 * tile + 2 * (lane % 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) rows[tile][e] *= e & 1 ? w.y : w.x;
    }
  }

  // recalled = v - recalled, token by token weighed.
  __device__ void differences(Rows& recalled, uint32_t values, const Record& record) const {
    scaleTokens(recalled, record.before, lane);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t raw[4];
      loadTilesTransposed(raw, values + b * 16 * Traits::kValuePitch);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float* at = &recalled[2 * b + e / 2][e % 2 * 2];
        at[0] = Activation<Act>::low(raw[e]) - at[0];
        at[1] = Activation<Act>::high(raw[e]) - at[1];
      }
    }
  }

  __device__ void corrections(Rows& u, const Rows& known, const Record& record) const {
#pragma unroll
    for (int from = 0; from < kBlocks; ++from) {
      uint32_t part[3][4];
      splitOperand<3>(part, known[2 * from], known[2 * from + 1]);
#pragma unroll
      for (int to = from; to < kBlocks; ++to) {
        const int pair = pairIndex(to, from);
        const uint4 first = record.inverse[pair][0][lane], second = record.inverse[pair][1][lane];
        const uint2 firstRest = record.inverseRest[pair][0][lane], secondRest = record.inverseRest[pair][1][lane];
        const uint32_t m[1][3][4] = {{{first.x, first.y, second.x, second.y},
                                      {first.z, first.w, second.z, second.w},
                                      {firstRest.x, firstRest.y, secondRest.x, secondRest.y}}};
        addProducts<3>(&u[2 * to], part, m);
      }
    }
  }

  __device__ void addCorrections(Rows& out, const Rows& u, const Record& record) const {
#pragma unroll
    for (int from = 0; from < kBlocks; ++from) {
      uint32_t part[2][4];
      splitOperand<2>(part, u[2 * from], u[2 * from + 1]);
#pragma unroll
      for (int to = from; to < kBlocks; ++to) {
        const int pair = pairIndex(to, from);
        const uint4 first = record.scores[pair][0][lane], second = record.scores[pair][1][lane];
        const uint32_t w[1][2][4] = {{{first.x, first.y, second.x, second.y}, {first.z, first.w, second.z, second.w}}};
        addProducts<2>(&out[2 * to], part, w);
      }
    }
  }

  __device__ void advance(WarpState<Traits::kStateDim>& state, Rows& u, uint32_t keys, const Record& record) const {
    scaleTokens(u, record.after, lane);
    constexpr int kSteps = Traits::kStateDim > 128 && Parts<Act>::kCount == 1 ? 1 : 2;  // blocks, for registers
#pragma unroll
    for (int first = 0; first < kBlocks; first += kSteps) {
      uint32_t part[kSteps][3][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        splitOperand<3>(part[step], u[2 * (first + step)], u[2 * (first + step) + 1]);
      }
      state.template advance<Act>(first == 0 ? record.total[0] : 1.0f, part, keys + first * 16 * kPitch, lane);
    }
  }

  __device__ void useTokens(WarpState<Traits::kStateDim>& state, char* at, const Chunk& c) const {
    const Record& record = *reinterpret_cast<const Record*>(at + Traits::kRecordOffset);
    const uint32_t keys = sharedAddress(at);
    const uint32_t v = keys + Traits::kValuesOffset + warp * 32 + columnsFirst(Traits::kValuePitch, lane);
    Rows u = {};
    {
      Rows out = {};
      {
        Rows known = {};
        readOut(known, out, state, keys);
        differences(known, v, record);
        corrections(u, known, record);
      }
      scaleTokens(out, record.query, lane);
      addCorrections(out, u, record);
      __syncwarp();  // the warp's columns of v make room for its outputs
      storePacked<Act>(out, v, Traits::kValuePitch);
      __syncwarp();
      storeOutputs<kChunk>(p, v - columnsFirst(Traits::kValuePitch, lane), Traits::kValuePitch, context(),
                           context().rowsBegin + warp * 16, c, lane);
    }
    advance(state, u, keys, record);
  }

  // Committed records whose corrections the ring keeps, in float16.
  __device__ void useRecords(WarpState<Traits::kStateDim>& state, char* at) const {
    const Record& record = *reinterpret_cast<const Record*>(at + Traits::kRecordOffset);
    const uint32_t v =
        sharedAddress(at + Traits::kValuesOffset) + warp * 32 + columnsFirst(Traits::kValuePitch, lane);
    Rows u;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t raw[4];
      loadTilesTransposed(raw, v + b * 16 * Traits::kValuePitch);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        u[2 * b + e / 2][e % 2 * 2] = Activation<__half>::low(raw[e]);
        u[2 * b + e / 2][e % 2 * 2 + 1] = Activation<__half>::high(raw[e]);
      }
    }
    advance(state, u, sharedAddress(at), record);
  }

  __device__ bool last(int index) const { return index + 1 == context().r.chunks(kChunk); }

  __device__ void run() const {
    WarpState<Traits::kStateDim> state;
    loadChunk(0);
    {
      const GdnScan begin = renewed();
      readState(state, p, context(), context().rowsBegin + begin.warp * 16, begin.lane);
    }
#pragma unroll 1
    for (int i = 0;; ++i) {
      loadsDrain();
      __syncthreads();
      if (!last(i) && p.stages == 2) renewed().loadChunk(i + 1);
      const Chunk c = Chunk::make(context().r, i, kChunk);
      if (!c.pending) {
        renewed().useTokens(state, stage(i), c);
      } else {
        renewed().useRecords(state, stage(i));
      }
      if (last(i)) break;
      if (p.stages == 1) {
        __syncthreads();
        renewed().loadChunk(i + 1);
      }
    }
    const GdnScan end = renewed();
    writeState(state, p, context(), context().rowsBegin + end.warp * 16, end.lane);
  }
};

// Grid: heads * splits, rows.
template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kWarps) gdnPrefillKernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(128) char shared[];
  const int head = blockIdx.x / p.splits, row = blockIdx.y;
  const int rowsHere = blockDim.x / 2, rowsBegin = blockIdx.x % p.splits * rowsHere;
  const PromptRow r = PromptRow::load(p, row);
  storeZeros(p, row, head, rowsBegin, rowsHere, r.tokens);
  if (r.slot < 0) return;
  if (threadIdx.x == 0) reinterpret_cast<HeadContext*>(shared)->fill(p, r, row, head, rowsBegin, true);
  __syncthreads();
  GdnScan<Traits>{p, shared, static_cast<int>(threadIdx.x)}.run();
}

}  // namespace replayssm
