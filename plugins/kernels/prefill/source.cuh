// Where the tokens of a row come from, committed records first: rows, chunks, and their way into shared memory.
#pragma once

#include "fragment.cuh"
#include "params.h"

namespace replayssm {

enum RowFlags : int { kFromZero = 1, kFromCarry = 2, kToCarry = 4 };

// Tokens of a chunk: half as many where a wide state, or operands of two parts, take the registers.
template <class Act, int kStateDim>
constexpr __host__ __device__ int chunkTokens() {
  return kStateDim * Parts<Act>::kCount > 128 ? 32 : 64;
}

constexpr __host__ __device__ int tilePitch(int elements) { return elements * 2 + 16; }  // bytes; rows on all banks

// The thread's index, anew: what is computed from it is not kept in registers from phase to phase.
__device__ __forceinline__ int renewedThread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// What one row is about. Inactive rows have slot -1 and no tokens: padding, and rows whose slot or carry does not exist.
struct PromptRow {
  int slot, tokens, flags, carry, origin, pending;

  static __device__ PromptRow inactive() {
    PromptRow r{};
    r.slot = -1;
    return r;
  }

  static __device__ PromptRow load(const PrefillParams& p, int row) {
    PromptRow r{};
    r.slot = p.slot[row * p.slotStride];
    r.tokens = min(max(p.numTokens[row * p.numTokensStride], 0), p.tokens);
    if (r.slot < 0 || r.slot >= p.slots || r.tokens == 0) return inactive();
    r.flags = p.rowFlags == nullptr ? 0 : p.rowFlags[row * p.rowFlagsStride];
    if ((r.flags & (kFromCarry | kToCarry)) != 0) {
      r.carry = p.carries > 0 ? p.carryIndex[row * p.carryIndexStride] : -1;
      if (r.carry < 0 || r.carry >= p.carries) return inactive();
    }
    if ((r.flags & (kFromZero | kFromCarry)) == 0 && p.staged == nullptr) {
      r.origin = min(max(p.origin[r.slot], 0), p.ringRows - 1);
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

// One input of one head: token t of the prompt at data + t * stride bytes.
struct Input {
  const char* data;
  int64_t stride;

  static __device__ Input prompt(const TokenTensor& t, int row, int head, int elementBytes) {
    return {static_cast<const char*>(t.data) + (row * t.rowStride + head * t.headStride) * elementBytes,
            t.tokenStride * elementBytes};
  }

  // ring: [S, heads, C, elements].
  static __device__ Input record(const void* ring, int64_t slotStride, int slot, int head, int ringRows, int elements,
                                 int elementBytes) {
    const int64_t at = slot * slotStride + static_cast<int64_t>(head) * ringRows * elements;
    return {static_cast<const char*>(ring) + at * elementBytes, static_cast<int64_t>(elements) * elementBytes};
  }
};

enum InputName { kKeys, kQueries, kValues, kDecays, kRates, kKeyFactors, kInputs };

// What all threads of a CTA know of their row and head. It lies in shared memory and is read again for every chunk: the
// state leaves no registers for it.
struct HeadContext {
  PromptRow r;
  int row, head, group;
  int rowsBegin;     // the first of the CTA's state rows of the head
  float rate, skip;  // Mamba-2: a and D of the head
  Input prompt[kInputs], record[kInputs];

  __device__ void fill(const PrefillParams& p, const PromptRow& from, int row_, int head_, int rowsBegin_, bool gdn) {
    r = from;
    rowsBegin = rowsBegin_;
    row = row_;
    head = head_;
    group = head / p.headsPerGroup;
    prompt[kKeys] = Input::prompt(p.k, row, group, 2);
    prompt[kQueries] = Input::prompt(p.q, row, group, 2);
    prompt[kValues] = Input::prompt(p.value, row, head, 2);
    prompt[kDecays] = Input::prompt(p.dt, row, head, 4);
    record[kKeys] = Input::record(p.ringKey, p.ringKeySlotStride, r.slot, group, p.ringRows, p.stateDim, 2);
    record[kValues] = Input::record(p.ringValue, p.ringValueSlotStride, r.slot, head, p.ringRows, p.headDim, 2);
    record[kDecays] = Input::record(p.ringDt, p.ringDtSlotStride, r.slot, head, p.ringRows, 1, 4);
    if (!gdn) {
      rate = p.a[head];
      skip = p.skip == nullptr ? 0.0f : p.skip[head];
      return;
    }
    prompt[kRates] = Input::prompt(p.beta, row, head, 4);
    record[kKeyFactors] = Input::record(p.ringKeyFactor, p.ringKeyFactorSlotStride, r.slot, group, p.ringRows, 1, 4);
  }
};
static_assert(sizeof(HeadContext) <= 256, "its place in shared memory");
constexpr int kContextBytes = 256;

// An input of one chunk.
struct ChunkInput {
  const char* data;
  int64_t stride;
  int first, wrap;  // records go round the ring

  __device__ ChunkInput(const HeadContext& context, InputName name, const Chunk& c, int ringRows) {
    const Input& input = c.pending ? context.record[name] : context.prompt[name];
    data = input.data;
    stride = input.stride;
    first = c.pending ? (context.r.origin + c.first) % ringRows : c.first;
    wrap = c.pending ? ringRows : INT32_MAX;
  }

  __device__ const char* at(int token) const {
    const int index = first + token;
    return data + (index >= wrap ? index - wrap : index) * stride;
  }

  __device__ float scalar(int token) const { return *reinterpret_cast<const float*>(at(token)); }
};

// Sixteen bytes global -> shared past the L1; zeros when `live` is false.
__device__ __forceinline__ void pieceOrZeros(uint32_t target, const void* source, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(live ? 16 : 0)
               : "memory");
}

// The pieces of one column of a tile of 16-bit elements, 16 bytes a token, for tokens token, token + step, ...; zeros
// from `count` on, whose addresses may be anything. Few registers matter more than unrolling: the state is live while
// tiles are asked for.
template <int kChunk>
__device__ __forceinline__ void loadTileColumn(uint32_t tile, int pitch, const ChunkInput& input, int column, int token,
                                               int step, int count) {
  const char* from = input.at(token) + column;
  int index = input.first + token;
  if (index >= input.wrap) index -= input.wrap;
  uint32_t to = tile + token * pitch;
#pragma unroll 1
  for (; token < kChunk; token += step, to += step * pitch) {
    pieceOrZeros(to, from, token < count);
    from += step * input.stride;
    index += step;
    if (index >= input.wrap) {
      index -= input.wrap;
      from -= input.wrap * input.stride;
    }
  }
}

// Keys or queries of a chunk.
template <int kChunk, int kStateDim>
__device__ __forceinline__ void loadKeyTile(uint32_t tile, const ChunkInput& input, int count, int thread) {
  constexpr int kPieces = kStateDim / 8;
  if constexpr ((kPieces & (kPieces - 1)) == 0) {  // a thread keeps its column
    const int piece = thread % kPieces;
    loadTileColumn<kChunk>(tile + piece * 16, tilePitch(kStateDim), input, piece * 16, thread / kPieces,
                           blockDim.x / kPieces, count);
  } else {
#pragma unroll 1
    for (int i = thread; i < kChunk * kPieces; i += blockDim.x) {
      const int token = i / kPieces, piece = i % kPieces;
      const bool live = token < count;
      pieceOrZeros(tile + token * tilePitch(kStateDim) + piece * 16, input.at(live ? token : 0) + piece * 16, live);
    }
  }
}

// Elements begin.. of the values of a chunk: every warp of the CTA its 16, two pieces a token.
template <int kChunk>
__device__ __forceinline__ void loadValueTile(uint32_t tile, int pitch, const ChunkInput& input, int begin, int count,
                                              int thread) {
  const int piece = thread / 32 * 2 + thread % 2;
  loadTileColumn<kChunk>(tile + piece * 16, pitch, input, begin * 2 + piece * 16, thread % 32 / 2, 16, count);
}

// The warp's 16 columns of an output tile (`tile` is their address in shared memory) to global memory, 32 bytes a
// token, from element `begin` of the head.
template <int kChunk>
__device__ __forceinline__ void storeOutputs(const PrefillParams& p, uint32_t tile, int pitch,
                                             const HeadContext& context, int begin, const Chunk& chunk, int lane) {
  uint16_t* out = static_cast<uint16_t*>(p.out) + context.row * p.outRowStride + context.head * p.outHeadStride + begin;
#pragma unroll 1
  for (int token = lane / 2; token < chunk.count; token += 16) {
    const void* from = __cvta_shared_to_generic(tile + token * pitch + lane % 2 * 16);
    *reinterpret_cast<uint4*>(out + (chunk.first + token) * p.outTokenStride + lane % 2 * 8) =
        *static_cast<const uint4*>(from);
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
