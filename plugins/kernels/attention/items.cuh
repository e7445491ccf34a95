// What a block works on: items of some query rows (token, head of the group) of one key head of one sequence and one
// part of its keys. Blocks stay for the whole launch and share the items out so that each has about as many keys.
#pragma once

#include "params.h"
#include "rows.cuh"

namespace replayssm {

constexpr int kPartPiece = 32;  // positions; parts of the keys are whole pieces
constexpr int kAlike = 16;

struct AttentionItem {
  int row, kvHead, firstRow, split;
  int slot, start, numTokens;
  int begin, end;  // positions of the part

  __device__ __forceinline__ int64_t cacheOffset(const AttentionParams& p) const {
    return (static_cast<int64_t>(slot) * p.kvHeads + kvHead) * p.depth * p.size;
  }
  // Element of q and out where the sequence begins.
  __device__ __forceinline__ int64_t queryOffset(const AttentionParams& p) const {
    return static_cast<int64_t>(row) * p.tokens * p.heads * p.size;
  }
};

// What a query row is: its token, and its first element after the sequence's.
struct QueryRow {
  int token, offset;

  // Row `index` of the key head's. The division is exact: rows are fewer than 2^20.
  __device__ __forceinline__ QueryRow(const AttentionParams& p, int kvHead, int index) {
    const int group = p.heads / p.kvHeads;
    token = static_cast<int>(__fdividef(static_cast<float>(index) + 0.5f, static_cast<float>(group)));
    offset = (token * p.heads + kvHead * group + index - token * group) * p.size;
  }
};

__device__ __forceinline__ int existingKeys(const AttentionParams& p, int row) {
  const int tokens = existingTokens(p, row);
  return tokens > 0 ? p.start[row] + tokens : 0;
}

// Rows in the order of falling numbers of keys into order[rows]; keys: room for as many numbers. All threads of the
// block take part. False, and nothing written, where the order makes no difference: one item a block, rows alike up to
// a kAlike-th (as in a verify step of sequences that began alike: ranking them costs more than it evens out); and where
// there are so many rows that they are even enough as they are.
template <class Traits>
__device__ __forceinline__ bool orderRows(const AttentionParams& p, int items, int* keys, uint16_t* order) {
  constexpr int kThreads = Traits::kThreads, kHeld = (Traits::kOrderedRows + kThreads - 1) / kThreads;
  if (items <= static_cast<int>(gridDim.x) || p.rows > Traits::kOrderedRows) return false;
  const int thread = static_cast<int>(threadIdx.x), first = existingKeys(p, 0);
  int held[kHeld];
  bool uneven = false;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = existingKeys(p, min(thread + i * kThreads, p.rows - 1));
    uneven |= abs(held[i] - first) > first / kAlike;
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (thread + i * kThreads < p.rows) keys[thread + i * kThreads] = held[i];
  }
  if (__syncthreads_or(uneven) == 0) return false;
  for (int row = thread; row < p.rows; row += kThreads) {
    const int own = keys[row];
    int rank = 0;
    for (int other = 0; other < p.rows; ++other) rank += keys[other] > own || (keys[other] == own && other < row);
    order[rank] = static_cast<uint16_t>(row);
  }
  __syncthreads();
  return true;
}

// The block's item of round `round`, of `items`: every second round deals from the other end. -1: it has none.
__device__ __forceinline__ int dealtItem(int round, int items) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int index = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  return index < items ? index : -1;
}

// Item number `index`: parts of the keys fastest, then blocks of kRows query rows, key heads, sequences. order: of
// the rows, or null.
template <int kRows>
__device__ __forceinline__ AttentionItem attentionItem(const AttentionParams& p, const uint16_t* order, int index) {
  AttentionItem item;
  const int blocks = (p.tokens * (p.heads / p.kvHeads) + kRows - 1) / kRows;
  item.split = index % p.splits;
  index /= p.splits;
  item.firstRow = index % blocks * kRows;
  index /= blocks;
  item.kvHead = index % p.kvHeads;
  index /= p.kvHeads;
  item.row = order != nullptr ? order[index] : index;
  item.slot = p.slot[item.row];
  item.start = p.start[item.row];
  item.numTokens = existingTokens(p, item.row);
  const int keys = item.numTokens > 0 ? item.start + item.numTokens : 0;
  const int part = ((keys + p.splits - 1) / p.splits + kPartPiece - 1) / kPartPiece * kPartPiece;
  item.begin = min(item.split * part, keys);
  item.end = min(item.begin + part, keys);
  return item;
}

}  // namespace replayssm
