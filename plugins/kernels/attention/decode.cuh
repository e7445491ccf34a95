// Attention of a decode or verify step. A block owns up to kTiles times 16 query rows (token, head of the group) of one
// key head and one part of the row's keys; its warps take every fourth tile of 16 keys and add their sums at the end.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "params.h"
#include "rows.cuh"
#include "tile.cuh"

namespace replayssm {

constexpr int kAttentionWarps = 4;
constexpr int kKvStages = 3;
constexpr int kPassKeys = kAttentionWarps * kTileKeys;  // of all warps at once

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
    const int part = ((keys + p.splits - 1) / p.splits + kPassKeys - 1) / kPassKeys * kPassKeys;
    begin = min(split * part, keys);
    end = min(begin + part, keys);
  }

  // Element of q and out where query row r, of the block's kRows, begins.
  __device__ __forceinline__ int64_t place(const AttentionParams& p, int r) const {
    const int index = firstRow + r;
    return ((static_cast<int64_t>(row) * p.tokens + index / group) * p.heads + kvHead * group + index % group) * p.size;
  }
};

template <class Act, int kSize, int kTiles>
struct AttentionTraits {
  static constexpr int kRows = 16 * kTiles;
  using Stream = KvStream<kSize, kKvStages>;
  static constexpr int kPitch = kSize + 4;  // floats of a row of sums in shared memory
  static constexpr int kQueryPieces = QueryTiles<Act, kSize, kTiles>::kQueryPieces;
  static constexpr int kRingBytes = kAttentionWarps * Stream::kBytes;
  static constexpr int kSumBytes = kAttentionWarps * kRows * kPitch * 4;
  static constexpr int kQueryBytes = kQueryPieces * 32 * 16;
  static constexpr int kShared = kQueryBytes + (kRingBytes > kSumBytes ? kRingBytes : kSumBytes);
};

// The block's queries into shared memory, and what its rows see. Rows that do not exist are zeros.
template <class Act, int kSize, int kTiles>
__device__ __forceinline__ void loadQueries(const AttentionParams& p, const AttentionBlock<16 * kTiles>& block,
                                            uint4* query, QueryTiles<Act, kSize, kTiles>& tiles) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 16 * t + 8 * i + g, token = (block.firstRow + r) / block.group;
      const bool exists = token < block.numTokens;
      tiles.last[t][i] = exists ? min(block.start + token, block.end - 1) : -1;
      const auto* from = static_cast<const uint16_t*>(p.q) + (exists ? block.place(p, r) : 0);
      for (int j = warp; j < kSize / 32; j += kAttentionWarps) {
        const int channel = 32 * j + 8 * c;
        query[((t * (kSize / 32) + j) * 2 + i) * 32 + lane] =
            loadIf(exists && channel < p.size, reinterpret_cast<const uint4*>(from + channel));
      }
    }
  }
  tiles.query = query;
  __syncthreads();
}

// The warps' sums relative to their common maximum into shared memory; the common statistics of row r into common[r].
template <class Act, int kSize, int kTiles>
__device__ __forceinline__ void addWarps(const QueryTiles<Act, kSize, kTiles>& tiles, float* sums,
                                         float2 (*statistic)[16 * kTiles], float2* common) {
  using Traits = AttentionTraits<Act, kSize, kTiles>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (c == 0) statistic[warp][16 * t + 8 * i + g] = {tiles.maximum[t][i], tiles.weight[t][i]};
    }
  }
  __syncthreads();  // also: no warp reads its ring any more
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 16 * t + 8 * i + g;
      float top = statistic[0][r].x, total = 0.0f;
      for (int w = 1; w < kAttentionWarps; ++w) top = fmaxf(top, statistic[w][r].x);
      const float base = top == -CUDART_INF_F ? 0.0f : top;
      for (int w = 0; w < kAttentionWarps; ++w) total += exp2f(statistic[w][r].x - base) * statistic[w][r].y;
      if (c == 0 && warp == 0) common[r] = {top, total};
      const float factor = exp2f(tiles.maximum[t][i] - base);
      float* to = sums + (warp * Traits::kRows + r) * Traits::kPitch;
#pragma unroll
      for (int n = 0; n < kSize / 8; n += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float4 four;
          four.x = tiles.sum[t][n][2 * i + k] * factor;
          four.y = tiles.sum[t][n + 1][2 * i + k] * factor;
          four.z = tiles.sum[t][n + 2][2 * i + k] * factor;
          four.w = tiles.sum[t][n + 3][2 * i + k] * factor;
          *reinterpret_cast<float4*>(to + 64 * (n / 8) + 16 * c + 8 * k + n % 8) = four;
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
  for (int w = 0; w < kAttentionWarps; ++w) {
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
template <class Act, int kSize, int kTiles>
__device__ __forceinline__ void writeRows(const AttentionParams& p, const AttentionBlock<16 * kTiles>& block,
                                          const float* sums, const float2* common) {
  using Traits = AttentionTraits<Act, kSize, kTiles>;
  const int lanes = p.size / 8;
  for (int item = static_cast<int>(threadIdx.x); item < Traits::kRows * lanes; item += 32 * kAttentionWarps) {
    const int r = item / lanes, channel = item % lanes * 8, index = block.firstRow + r;
    if (index >= block.queryRows) continue;
    float x[8];
    sumOfWarps<Traits>(sums, r, channel, x);
    if (p.splits == 1) {
      const bool exists = index / block.group < block.numTokens;
#pragma unroll
      for (int v = 0; v < 8; ++v) x[v] = exists ? x[v] / common[r].y : 0.0f;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + block.place(p, r) + channel) = pack<Act>(x);
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

// Blocks: parts of the keys along x, key heads and their blocks of query rows along y, sequences along z.
template <class Act, int kSize, int kTiles>
__global__ void __launch_bounds__(32 * kAttentionWarps) attentionKernel(const __grid_constant__ AttentionParams p) {
  using Traits = AttentionTraits<Act, kSize, kTiles>;
  using Stream = typename Traits::Stream;
  extern __shared__ uint4 query[];
  uint4* shared = query + Traits::kQueryPieces * 32;
  __shared__ float2 statistic[kAttentionWarps][Traits::kRows], common[Traits::kRows];
  releaseDependents();
  waitForPredecessor();
  const AttentionBlock<Traits::kRows> block(p);
  QueryTiles<Act, kSize, kTiles> tiles;
  tiles.clear();
  if (block.begin < block.end) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t cache = (static_cast<int64_t>(block.slot) * p.kvHeads + block.kvHead) * p.depth * p.size;
    const Stream stream{static_cast<const uint16_t*>(p.keys) + cache,
                        static_cast<const uint16_t*>(p.values) + cache,
                        shared + warp * (Stream::kBytes / 16),
                        p.size,
                        block.end,
                        static_cast<int>(threadIdx.x) % 32};
    const int first = block.begin + warp * kTileKeys;
#pragma unroll
    for (int stage = 0; stage < kKvStages - 1; ++stage) {
      if (first + stage * kPassKeys < block.end) stream.fetch(stage, first + stage * kPassKeys);
      Stream::commit();
    }
    loadQueries<Act, kSize, kTiles>(p, block, query, tiles);
    int stage = 0;
    for (int position = first; position < block.end; position += kPassKeys) {
      Stream::wait();
      const int ahead = position + (kKvStages - 1) * kPassKeys;
      const int next = stage == 0 ? kKvStages - 1 : stage - 1;  // used in the last pass
      if (ahead < block.end) stream.fetch(next, ahead);
      Stream::commit();
      float s[kTiles][2][4];
      tiles.scores(stream, stage, position, p.scale, s);
      tiles.rescale(s);
      tiles.accumulate(stream, stage, s);
      stage = stage + 1 == kKvStages ? 0 : stage + 1;
    }
    tiles.finish();
  }
  addWarps<Act, kSize, kTiles>(tiles, reinterpret_cast<float*>(shared), statistic, common);
  writeRows<Act, kSize, kTiles>(p, block, reinterpret_cast<const float*>(shared), common);
}

}  // namespace replayssm
