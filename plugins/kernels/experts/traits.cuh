// Compile-time choices of a grouped product: the weights' format and the most tokens of a pass fix how many warps multiply,
// how many blocks share a multiprocessor, and what a stage of the ring holds.
#pragma once

#include "formats.cuh"
#include "params.h"

namespace replayssm {

constexpr int kMostStages = 8;
constexpr int kTokenPad = 16;  // bytes behind a token's row of a stage: keeps the lanes' 16-byte loads off each other

// kMost_: tiles of 8 tokens of a pass. Up to 4 two blocks share a multiprocessor; the sums of more tokens leave
// registers for one, and so do the stages of bfloat16 weights.
template <class Format_, int kMost_>
struct GroupedTraits {
  using Format = Format_;
  static constexpr int kMost = kMost_;
  static constexpr int kBlocks = kMost <= 4 && Format::kPieces <= 2 ? 2 : 1;
  static constexpr int kWarps = 8;                           // that multiply
  static constexpr int kTokenWarps = kBlocks == 2 ? 1 : 3;   // that copy tokens; one more copies weights
  static constexpr int kFullArrivals = 1 + 32 * kTokenWarps;  // of a stage: weights once, tokens by every lane
  static constexpr int kWarpTiles = 2;  // of a warp in a round
  static constexpr int kThreads = (kWarps + 1 + kTokenWarps) * 32;
  static constexpr int kRoundTiles = kWarps * kWarpTiles;
  static constexpr int kRoundGroups = kRoundTiles / kLayoutTiles;
  static_assert(kRoundTiles % kLayoutTiles == 0, "a round is whole groups: few and large copies");

  static constexpr int kColumnBytes = Format::kStepColumns * 2;  // of a token's columns of a step
  static constexpr int kTokenBytes = kColumnBytes + kTokenPad;
  static constexpr int kTileBytes = Format::kPieces * kPieceBytes;
  static constexpr int kScaleTileBytes = Format::kScaleBytes * 32;
  static constexpr int kElementBytes = kRoundTiles * kTileBytes;  // of a stage; the scales follow, then the tokens
  static constexpr int kWeightBytes = kElementBytes + kRoundTiles * kScaleTileBytes;

  __host__ __device__ static constexpr int stageBytes(int tokens) { return kWeightBytes + tokens * kTokenBytes; }

  // How a warp copies tokens: kPieceLanes lanes along a token's columns, 16 bytes each, the others along tokens.
  static constexpr int kRowPieces = kColumnBytes / 16;
  static constexpr int kPieceLanes = kRowPieces < 32 ? kRowPieces : 32;
  static constexpr int kLanePieces = kRowPieces / kPieceLanes;
  static constexpr int kRowsAtOnce = 32 / kPieceLanes;
  static constexpr int kLaneRows = (kMost * 8 + kRowsAtOnce * kTokenWarps - 1) / (kRowsAtOnce * kTokenWarps);

  // Of 16 bytes of a token's columns, behind the weights of a stage.
  __device__ static __forceinline__ uint32_t pieceOffset(int row, int piece) {
    return row * kTokenBytes + piece * 16;
  }

  // The i-th tile of a warp in a round: a last round of few tiles gives every warp one before any gets two.
  __device__ static __forceinline__ int tileOf(int first, int warp, int i) {
    return first + i * kWarps + warp;
  }
};

}  // namespace replayssm
