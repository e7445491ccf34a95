// What the first GDN kernel leaves to the second for one chunk of one head: matrices as operands, in the order in which
// lanes read them, and the decay vectors.
//
// Blocks of 16 tokens t by 16 tokens j on and below the diagonal, in the order (to, from <= to); a block is two
// operands of 8 tokens t. Every lane has 16 bytes of both operands' leading parts side by side.
#pragma once

#include <cstddef>

#include "decay.cuh"
#include "source.cuh"

namespace replayssm {

template <int kChunk>
struct alignas(128) GdnRecord {
  static constexpr int kBlocks = kChunk / kBlockTokens;
  static constexpr int kPairs = kBlocks * (kBlocks + 1) / 2;
  uint4 inverse[kPairs][2][32];      // [block][half of t][lane]: first two parts of (I + L)^-1 diag(beta)
  uint2 inverseRest[kPairs][2][32];  // its third part
  uint4 scores[kPairs][2][32];       // two parts of <q, k> with decay and factors
  float before[kChunk];              // exp(sum up to t) / |k_t|: recalled values
  float query[kChunk];               // exp(sum up to t) / (|q_t| sqrt(N)): outputs
  float after[kChunk];               // exp(sum after j) / |k_j|: the state
  float total[4];                    // exp(sum of all), four times: pieces of 16 bytes are written whole
};

// Chunks of a row that may have records: committed ones, then the prompt's.
constexpr __host__ __device__ int recordChunks(int window, int tokens, int chunk) {
  return (window + chunk - 1) / chunk + (tokens + chunk - 1) / chunk;
}

template <int kChunk>
__device__ __forceinline__ GdnRecord<kChunk>* recordOf(const PrefillParams& p, int row, int chunk, int head) {
  const int64_t at = (static_cast<int64_t>(row) * recordChunks(p.window, p.tokens, kChunk) + chunk) * p.heads + head;
  return reinterpret_cast<GdnRecord<kChunk>*>(p.records) + at;
}

// Where what the second kernel copies of a record begins and ends: of committed records nobody writes the matrices.
template <int kChunk>
__device__ __forceinline__ int recordBegin(bool pending) {
  return pending ? static_cast<int>(offsetof(GdnRecord<kChunk>, before)) : 0;
}
template <int kChunk>
__device__ __forceinline__ int recordEnd() {
  return static_cast<int>(offsetof(GdnRecord<kChunk>, total) + sizeof(GdnRecord<kChunk>::total));
}

constexpr __host__ __device__ int pairIndex(int to, int from) { return to * (to + 1) / 2 + from; }

}  // namespace replayssm
