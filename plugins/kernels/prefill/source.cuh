// Where the tokens of a row come from, committed records first: rows, chunks, and their way into shared memory.
#pragma once

#include "fragment.cuh"
#include "params.h"

namespace replayssm {

enum RowFlags : int { kFromZero = 1, kFromCarry = 2, kToCarry = 4 };

template <int kStateDim>
constexpr __host__ __device__ int chunkTokens() {
  return kStateDim > 128 ? 32 : 64;  // of a wider state fewer tokens fit into the registers beside it
}

constexpr __host__ __device__ int tilePitch(int elements) { return elements * 2 + 16; }  // bytes; rows on all banks

// What one row is about. Inactive rows have slot -1 and no tokens.
struct PromptRow {
  int slot, tokens, flags, origin, pending;

  static __device__ PromptRow load(const PrefillParams& p, int row) {
    PromptRow r{};
    r.slot = p.slot[row * p.slotStride];
    r.tokens = min(max(p.numTokens[row * p.numTokensStride], 0), p.tokens);
    if (r.slot < 0 || r.tokens == 0) {
      r.slot = -1;
      r.tokens = 0;
      return r;
    }
    r.flags = p.rowFlags == nullptr ? 0 : p.rowFlags[row * p.rowFlagsStride];
    if ((r.flags & (kFromZero | kFromCarry)) == 0) {
      r.origin = p.origin[r.slot];
      r.pending = min(max(p.pending[r.slot], 0), p.window);
    }
    return r;
  }

  __device__ int pendingChunks(int chunk) const { return (pending + chunk - 1) / chunk; }
  __device__ int chunks(int chunk) const { return pendingChunks(chunk) + (tokens + chunk - 1) / chunk; }
};

// Chunk `index` of a row, committed records first.
struct Chunk {
  bool pending;
  int first, count;  // records from the oldest, or tokens

  static __device__ Chunk make(const PromptRow& row, int index, int tokens) {
    const int before = row.pendingChunks(tokens);
    Chunk c;
    c.pending = index < before;
    c.first = (c.pending ? index : index - before) * tokens;
    c.count = min((c.pending ? row.pending : row.tokens) - c.first, tokens);
    return c;
  }
};

// Token t of a chunk lies at data + index(t) * stride elements.
struct TokenSource {
  const void* data;
  int64_t stride;
  int first, wrap;  // records go round the ring

  static __device__ TokenSource prompt(const PromptTensor& t, int row, int head, const Chunk& c, int elementBytes) {
    const char* at = static_cast<const char*>(t.data) + (row * t.rowStride + head * t.headStride) * elementBytes;
    return {at, t.tokenStride, c.first, INT32_MAX};
  }

  // ring: [S, heads, C, elements].
  static __device__ TokenSource record(const void* ring, int64_t slotStride, const PromptRow& r, int head, int ringRows,
                                       int elements, const Chunk& c, int elementBytes) {
    const char* at = static_cast<const char*>(ring) +
                     (r.slot * slotStride + static_cast<int64_t>(head) * ringRows * elements) * elementBytes;
    return {at, elements, (r.origin + c.first) % ringRows, ringRows};
  }

  __device__ int64_t index(int token) const {
    int at = first + token;
    return at >= wrap ? at - wrap : at;
  }

  __device__ float scalar(int token) const { return static_cast<const float*>(data)[index(token) * stride]; }
};

// Sixteen bytes global -> shared past the L1; zeros when `live` is false.
__device__ __forceinline__ void pieceOrZeros(uint32_t target, const void* source, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(live ? 16 : 0)
               : "memory");
}

// Elements begin..begin + elements - 1 of kChunk tokens as a tile of 16-bit elements; zeros from `count` on.
template <int kChunk>
__device__ __forceinline__ void loadTile(uint32_t tile, int pitch, const TokenSource& source, int begin, int elements,
                                         int count) {
  const int pieces = elements / 8;
  for (int i = threadIdx.x; i < kChunk * pieces; i += blockDim.x) {
    const int token = i / pieces, piece = i % pieces;
    const bool live = token < count;
    const uint16_t* from = static_cast<const uint16_t*>(source.data) + source.index(live ? token : 0) * source.stride;
    pieceOrZeros(tile + token * pitch + piece * 16, from + begin + piece * 8, live);
  }
}

// The warp's 16 columns of an output tile to global memory, 32 bytes a token; the tile holds activations.
template <int kChunk>
__device__ __forceinline__ void storeOutputs(const PrefillParams& p, const char* tile, int pitch, int row, int head,
                                             int column, int begin, const Chunk& chunk, int lane) {
  uint16_t* out = static_cast<uint16_t*>(p.out) + row * p.outRowStride + head * p.outHeadStride + begin;
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i) {
    const int token = 16 * i + lane / 2;
    if (token >= chunk.count) break;
    *reinterpret_cast<uint4*>(out + (chunk.first + token) * p.outTokenStride + lane % 2 * 8) =
        *reinterpret_cast<const uint4*>(tile + token * pitch + column * 2 + lane % 2 * 16);
  }
}

// Zeros behind the row's tokens, elements begin..begin + elements - 1 of a head.
__device__ __forceinline__ void storeZeros(const PrefillParams& p, int row, int head, int begin, int elements,
                                           int tokens) {
  uint16_t* out = static_cast<uint16_t*>(p.out) + row * p.outRowStride + head * p.outHeadStride + begin;
  const int pieces = elements / 8;
  const int64_t total = static_cast<int64_t>(p.tokens - tokens) * pieces;
  for (int64_t i = threadIdx.x; i < total; i += blockDim.x) {
    *reinterpret_cast<uint4*>(out + (tokens + i / pieces) * p.outTokenStride + i % pieces * 8) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace replayssm
