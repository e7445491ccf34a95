// The draw as the ABI layer sees it: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

// What a block of the scan found in its piece of a position's logits, words of kWord ids.
struct PieceBest {
  uint32_t key;   // of the largest logit; NaN is larger than any number
  uint32_t word;  // the first that has it
  float lowest;   // finite logit; infinite: there is none
};

struct DrawParams {
  int32_t rows, width, vocab;
  int32_t entries;  // of settings
  bool wide;        // every position's logits are whole aligned pieces of 4

  const float* logits;
  const int64_t* row;  // null: argmax, whatever the settings
  const int64_t* length;
  const int64_t* seed;
  const float* temperature;
  const int64_t* topK;
  const float* topP;
  const float* minP;
  int64_t* tokens;
  int32_t* finite;
  int64_t rowStride, positionStride;  // of logits

  int32_t pieces, turns;  // of a position; of a piece: what a block of the scan reads at once
  PieceBest* found;       // [B, T, pieces]
};

constexpr int kWord = 4;  // ids of one 16-byte access
constexpr int kScanThreads = 256;
constexpr int kScanAhead = 4;  // words of a thread on their way at once
constexpr int kScanTurn = kScanThreads * kScanAhead * kWord;
constexpr int kMaxScanTurns = 8;
constexpr int kEnoughScanBlocks = 4096;  // for a large device; from there on blocks read more each

constexpr int kDrawThreads = 384;
constexpr int kDrawChunk = 128;  // tokens of a warp's piece: 4 a lane
constexpr int kMaxDrawVocab = 1 << 20;  // one float of shared memory a chunk

// How many turns of the scan a block takes: the one place that knows how positions are cut.
inline int32_t scanTurns(int64_t positions, int32_t vocab) {
  const int64_t turns = positions * ((vocab + kScanTurn - 1) / kScanTurn) / kEnoughScanBlocks;
  return turns < 1 ? 1 : turns > kMaxScanTurns ? kMaxScanTurns : static_cast<int32_t>(turns);
}
inline int32_t scanPieces(int32_t vocab, int32_t turns) { return (vocab - 1) / (turns * kScanTurn) + 1; }

cudaError_t launchDraw(const DrawParams& p, cudaStream_t stream);

}  // namespace replayssm
