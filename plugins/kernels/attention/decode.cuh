// Attention of a decode or verify step. A block owns some query rows (token, head of the group) of one key head and one
// part of the sequence's keys. Its warps divide the rows, in tiles of 16, or the keys, whose sums they add at the end.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "params.h"
#include "rows.cuh"
#include "tile.cuh"

namespace replayssm {

constexpr int kPartPiece = 2 * kTileKeys;  // parts of the keys are whole pieces, whatever the kernel

// The block's place: which rows of which sequence and key head, and its part [begin, end) of the keys.
template <int kRows>
struct AttentionBlock {
  int row, kvHead, split, firstRow, begin, end;
  int slot, start, numTokens, group, queryRows;

  __device__ __forceinline__ explicit AttentionBlock(const AttentionParams& p) {
    row = static_cast<int>(blockIdx.z);
    split = static_cast<int>(blockIdx.x);
    group = p.heads / p.kvHeads;
    queryRows = p.tokens * group;
    const int blocks = (queryRows + kRows - 1) / kRows;
    kvHead = static_cast<int>(blockIdx.y) / blocks;
    firstRow = static_cast<int>(blockIdx.y) % blocks * kRows;
    slot = p.slot[row];
    start = p.start[row];
    numTokens = existingTokens(p, row);
    const int keys = numTokens > 0 ? start + numTokens : 0;
    const int part = ((keys + p.splits - 1) / p.splits + kPartPiece - 1) / kPartPiece * kPartPiece;
    begin = min(split * part, keys);
    end = min(begin + part, keys);
  }

  // Element of q and out where query row r, of the block's kRows, begins.
  __device__ __forceinline__ int64_t place(const AttentionParams& p, int r) const {
    const int index = firstRow + r;
    return ((static_cast<int64_t>(row) * p.tokens + index / group) * p.heads + kvHead * group + index % group) * p.size;
  }
};

// kTiles: of 16 query rows, a warp's own. kRowWarps have other rows and share the stream of keys; kKeyWarps have the same
// rows, a stream each and every kKeyWarps-th tile of keys. One of the two is 1.
template <class Act_, int kSize_, int kTiles_, int kRowWarps_, int kKeyWarps_>
struct AttentionTraits {
  using Act = Act_;
  static constexpr int kSize = kSize_, kTiles = kTiles_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_;
  static_assert(kRowWarps == 1 || kKeyWarps == 1, "a shared stream is the block's");
  static constexpr int kWarps = kRowWarps * kKeyWarps, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kTiles, kRows = kRowWarps * kWarpRows;
  static constexpr int kPassKeys = kKeyWarps * kTileKeys;
  using Stream = KvStream<kSize, kRowWarps == 1 ? 3 : 4, kRowWarps>;
  using Tiles = QueryTiles<Act, kSize, kTiles>;
  static constexpr int kPitch = kSize + 4;  // floats of a row of sums in shared memory
  static constexpr int kQueryWords = kRowWarps * Tiles::kQueryPieces * 32;
  static constexpr int kRingBytes = kKeyWarps * Stream::kBytes;
  static constexpr int kSumBytes = kKeyWarps * kRows * kPitch * 4;
  static constexpr int kShared = kQueryWords * 16 + (kRingBytes > kSumBytes ? kRingBytes : kSumBytes);
};

struct WarpPlace {
  int rowWarp, keyWarp, lane, g, c;

  template <class Traits>
  static __device__ __forceinline__ WarpPlace of() {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    return {warp % Traits::kRowWarps, warp / Traits::kRowWarps, lane, lane / 4, lane % 4};
  }
};

// The block's queries into shared memory, and what its rows see. Rows that do not exist are zeros.
template <class Traits>
__device__ __forceinline__ void loadQueries(const AttentionParams& p, const AttentionBlock<Traits::kRows>& block,
                                            uint4* query, typename Traits::Tiles& tiles) {
  constexpr int kChunks = Traits::kSize / 32;
  const auto at = WarpPlace::of<Traits>();
  query += at.rowWarp * Traits::Tiles::kQueryPieces * 32;
#pragma unroll
  for (int t = 0; t < Traits::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = at.rowWarp * Traits::kWarpRows + 16 * t + 8 * i + at.g;
      const int token = (block.firstRow + r) / block.group;
      const bool exists = token < block.numTokens;
      tiles.last[t][i] = exists ? min(block.start + token, block.end - 1) : -1;
      const auto* from = static_cast<const uint16_t*>(p.q) + (exists ? block.place(p, r) : 0);
      for (int j = at.keyWarp; j < kChunks; j += Traits::kKeyWarps) {
        const int channel = 32 * j + 8 * at.c;
        query[((t * kChunks + j) * 2 + i) * 32 + at.lane] =
            loadIf(exists && channel < p.size, reinterpret_cast<const uint4*>(from + channel));
      }
    }
  }
  tiles.query = query;
  __syncthreads();
}

// The warps' sums relative to their common maximum into shared memory; the common statistics of row r into common[r].
template <class Traits>
__device__ __forceinline__ void addWarps(const typename Traits::Tiles& tiles, float* sums,
                                         float2 (*statistic)[Traits::kRows], float2* common) {
  const auto at = WarpPlace::of<Traits>();
#pragma unroll
  for (int t = 0; t < Traits::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = at.rowWarp * Traits::kWarpRows + 16 * t + 8 * i + at.g;
      if (at.c == 0) statistic[at.keyWarp][r] = {tiles.maximum[t][i], tiles.weight[t][i]};
    }
  }
  __syncthreads();  // also: no warp reads its ring any more
#pragma unroll
  for (int t = 0; t < Traits::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = at.rowWarp * Traits::kWarpRows + 16 * t + 8 * i + at.g;
      float top = statistic[0][r].x, total = 0.0f;
      for (int w = 1; w < Traits::kKeyWarps; ++w) top = fmaxf(top, statistic[w][r].x);
      const float base = top == -CUDART_INF_F ? 0.0f : top;
      for (int w = 0; w < Traits::kKeyWarps; ++w) total += exp2f(statistic[w][r].x - base) * statistic[w][r].y;
      if (at.c == 0 && at.keyWarp == 0) common[r] = {top, total};
      const float factor = exp2f(tiles.maximum[t][i] - base);
      float* to = sums + (at.keyWarp * Traits::kRows + r) * Traits::kPitch;
#pragma unroll
      for (int n = 0; n < Traits::kSize / 8; n += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float4 four;
          four.x = tiles.sum[t][n][2 * i + k] * factor;
          four.y = tiles.sum[t][n + 1][2 * i + k] * factor;
          four.z = tiles.sum[t][n + 2][2 * i + k] * factor;
          four.w = tiles.sum[t][n + 3][2 * i + k] * factor;
          *reinterpret_cast<float4*>(to + 64 * (n / 8) + 16 * at.c + 8 * k + n % 8) = four;
        }
      }
    }
  }
  __syncthreads();
}

// Eight channels of a row, over the warps.
template <class Traits>
__device__ __forceinline__ void sumOfWarps(const float* sums, int r, int channel, float (&x)[8]) {
#pragma unroll
  for (int v = 0; v < 8; ++v) x[v] = 0.0f;
#pragma unroll
  for (int w = 0; w < Traits::kKeyWarps; ++w) {
    const auto* from = reinterpret_cast<const float4*>(sums + (w * Traits::kRows + r) * Traits::kPitch + channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = from[i];
      x[4 * i] += four.x;
      x[4 * i + 1] += four.y;
      x[4 * i + 2] += four.z;
      x[4 * i + 3] += four.w;
    }
  }
}

// Results of the block's rows: the output, or the part's sums and statistics.
template <class Traits>
__device__ __forceinline__ void writeRows(const AttentionParams& p, const AttentionBlock<Traits::kRows>& block,
                                          const float* sums, const float2* common) {
  const int lanes = p.size / 8;
  for (int item = static_cast<int>(threadIdx.x); item < Traits::kRows * lanes; item += Traits::kThreads) {
    const int r = item / lanes, channel = item % lanes * 8, index = block.firstRow + r;
    if (index >= block.queryRows) continue;
    float x[8];
    sumOfWarps<Traits>(sums, r, channel, x);
    if (p.splits == 1) {
      const bool exists = index / block.group < block.numTokens;
#pragma unroll
      for (int v = 0; v < 8; ++v) x[v] = exists ? x[v] / common[r].y : 0.0f;
      auto* to = static_cast<uint16_t*>(p.out) + block.place(p, r) + channel;
      *reinterpret_cast<uint4*>(to) = pack<typename Traits::Act>(x);
      continue;
    }
    const int64_t part =
        ((static_cast<int64_t>(block.row) * p.kvHeads + block.kvHead) * p.splits + block.split) * block.queryRows +
        index;
    auto* to = reinterpret_cast<float4*>(p.partial + part * p.size + channel);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
    if (channel == 0) p.statistic[part] = common[r];
  }
}

// The keys of the block's part, in passes of the key warps over one tile each.
template <class Traits>
__device__ __forceinline__ void attend(const AttentionParams& p, const AttentionBlock<Traits::kRows>& block,
                                       uint4* query, uint4* ring, typename Traits::Tiles& tiles) {
  using Stream = typename Traits::Stream;
  constexpr int kStages = Stream::kStages, kPass = Traits::kPassKeys;
  const auto at = WarpPlace::of<Traits>();
  const int64_t cache = (static_cast<int64_t>(block.slot) * p.kvHeads + block.kvHead) * p.depth * p.size;
  const Stream stream{static_cast<const uint16_t*>(p.keys) + cache,
                      static_cast<const uint16_t*>(p.values) + cache,
                      ring + at.keyWarp * (Stream::kBytes / 16),
                      p.size,
                      block.end,
                      at.rowWarp,
                      at.lane};
  const int first = block.begin + at.keyWarp * kTileKeys;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (first + stage * kPass < block.end) stream.fetch(stage, first + stage * kPass);
    Stream::commit();
  }
  loadQueries<Traits>(p, block, query, tiles);
  int stage = 0;
  for (int position = first; position < block.end; position += kPass) {
    Stream::wait();
    const int ahead = position + (kStages - 1) * kPass;
    if (ahead < block.end) stream.fetch(stage == 0 ? kStages - 1 : stage - 1, ahead);  // where the last pass was
    Stream::commit();
    float s[Traits::kTiles][2][4];
    tiles.scores(stream, stage, position, p.scale, s);
    tiles.rescale(s);
    tiles.accumulate(stream, stage, s);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  tiles.finish();
}

// Blocks: parts of the keys along x, key heads and their blocks of query rows along y, sequences along z.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads) attentionKernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ uint4 query[];
  uint4* ring = query + Traits::kQueryWords;
  __shared__ float2 statistic[Traits::kKeyWarps][Traits::kRows], common[Traits::kRows];
  releaseDependents();
  waitForPredecessor();
  const AttentionBlock<Traits::kRows> block(p);
  typename Traits::Tiles tiles;
  tiles.clear();
  if (block.begin < block.end) attend<Traits>(p, block, query, ring, tiles);
  addWarps<Traits>(tiles, reinterpret_cast<float*>(ring), statistic, common);
  writeRows<Traits>(p, block, reinterpret_cast<const float*>(ring), common);
}

}  // namespace replayssm
