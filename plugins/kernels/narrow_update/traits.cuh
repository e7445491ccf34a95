// Compile-time choices of the update with narrow states, and the shared-memory layout that follows from them.
//
// A CTA is kWarps warps and a PART: a run of heads of one row and group. On a step that does not flush, every warp
// streams its own ITEMS (w, w + kWarps, ...), a head or some rows of one, through a private ring of stages: nobody
// waits for anybody. On a flush all warps take every head together, 16 state rows each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../replay_update/traits.cuh"
#include "formats.cuh"

namespace replayssm {

constexpr int kMaxPartHeads = 16;
constexpr int kMaxNarrowStages = 3;  // of a warp
constexpr int kBarrierArea = 256;    // bytes, the last of which are the part's cursors
constexpr int kSavedPart = 192;
// Warps tell each other largest magnitudes: rows of 16 words, a barrier each, and how many heads there have been.
constexpr int kMaximumRows = 4, kMaximumBarriers = kMaximumRows * 64, kHeadCount = kMaximumBarriers + kMaximumRows * 8;
constexpr int kMaximumBytes = kHeadCount + 16;
constexpr int kItemBytes = 80;  // behind a warp's slab: the item in work, at 16 what FlushBase lists

// First column of lane c's piece b (see NarrowTraits::pieceColumn): 16 columns of every 64 are a lane's.
template <bool kExchanged>
__device__ __forceinline__ int slabColumn(int b, int c) {
  return b / 2 * 64 + c * 16 + (b % 2 ^ (kExchanged ? c / 2 : 0)) * 8;
}

// How a flush takes the runs of a slab (eachRun): all of them in code, or one, to which the others come: copied, which takes
// a run's registers, or moving up, after which the slab is lost. An instruction cache that does not hold a slab's way costs
// more than the moves.
enum class RunOrder { kUnrolled, kCopied, kMovedUp };

template <Family kFamily_, StateFormat kRecurrence_, StateFormat kRead_, class Act_, int kHeadDim_, int kStateDim_,
          int kWarps_, int kMaxTokens_>
struct NarrowTraits {
  static constexpr bool kGdn = kFamily_ == Family::gdn;
  using Act = Act_;
  static constexpr StateFormat kRecurrence = kRecurrence_;  // the checkpoint that flushes fold into
  static constexpr StateFormat kRead = kRead_;              // the copy other steps read
  static constexpr bool kShared = kRecurrence == kRead;     // one copy serves both
  static constexpr int kHeadDim = kHeadDim_;                // P
  static constexpr int kStateDim = kStateDim_;              // N
  static constexpr int kWarps = kWarps_;
  static constexpr int kMaxTokens = kMaxTokens_;
  static constexpr int kThreads = 32 * kWarps;
  // CTAs a multiprocessor should have registers for: of Mamba-2 twelve warps, of GDN sixteen for one token; eight where
  // that would spill.
  static constexpr bool kTwelveWarps =
      kRead == StateFormat::kE2m1 ||
      (kMaxTokens == 1 && !(kRecurrence == StateFormat::kFloat16 && kRead == StateFormat::kE4m3));
  static constexpr int kBlocksWanted = kGdn ? (kMaxTokens == 1 ? 2 : 1) : kTwelveWarps ? 12 / kWarps : 2;
  static constexpr int kSlabs = kHeadDim / 16;  // a slab is the 16 state rows of a matrix instruction
  static constexpr int kSteps = kStateDim / 16;

  // A streamed item: a whole head, or of the large and few heads of GDN two slabs.
  static constexpr int kItemSlabs = kGdn ? 2 : kSlabs;
  static constexpr int kItems = kSlabs / kItemSlabs;  // of a head

  // What the shared read-out code asks for: a token's vectors are its query, for GDN its key and its query, in a tile.
  static constexpr int kVectorsPerToken = kGdn ? 2 : 1;
  static constexpr int kTiles = 1;
  static constexpr int kBlocks = kStateDim / 32;
  static constexpr int kKeyPitch = kStateDim * 2 + 64;  // bytes; see UpdateTraits
  static constexpr int kValuePitch = kItemSlabs * 32 + 16;  // of an item's records; eight rows fall on distinct banks
  static constexpr int kSlabValuePitch = 48;             // of a slab's 16 columns of them, likewise

  // A slab in registers: lane (g, c) holds, of rows g and g + 8, four pieces of eight columns; first column of piece b.
  // With float32 the pieces of lanes 2 and 3 are exchanged, so that fewer of them share banks.
  static constexpr bool kExchanged = kRecurrence == StateFormat::kFloat32;
  static __device__ __forceinline__ int pieceColumn(int b, int c) { return slabColumn<kExchanged>(b, c); }

  using Recurrence = FormatSize<kRecurrence, kStateDim>;
  using Read = FormatSize<kRead, kStateDim>;
  static constexpr int kSlabBytes = 16 * Recurrence::kRowBytes;  // of codes
  static constexpr int kStateBytes = 16 * kItemSlabs * Read::kRowBytes;  // of an item
  static constexpr int kScaleBytes = 16 * kItemSlabs * Read::kScaleBytes;

  // Plain decoding in windows of up to 16 records has kernels of its own (plain.cuh, which keeps a head's 16 weights
  // and its factors in shared memory; plain_gdn.cuh, where a part may be of several groups).
  static constexpr bool kOneToken = kMaxTokens == 1;
  static constexpr bool kPlain = !kGdn && kOneToken;
  static constexpr bool kPlainGdn = kGdn && kOneToken;
  // There a flush recalls from codes that are exact in float16, with the keys in float16 too: 16 rows a group, which
  // the warps' areas share.
  static constexpr bool kRecallsCodes = kPlainGdn && kRecurrence != StateFormat::kFloat32;
  static constexpr int kHalfPitch = kStateDim * 2 + 16;
  // Likewise Mamba-2's reads out for its token, with the query in float16, and adds the records by their products with it.
  static constexpr bool kReadsCodes = kPlain && kRecurrence != StateFormat::kFloat32;
  // There, of a group: both vectors of the token in float16, their products with records, what they are multiplied by.
  static constexpr int kVectorDots = 4 * kStateDim, kVectorFactors = kVectorDots + 32 * 16;
  static constexpr int kVectorBytes = kVectorFactors + 16;
  static constexpr int kSolveBytes = kPlainGdn ? 1616 : 0;  // of a head (HeadSolve), behind a warp's slab
  static constexpr int kPlainWindow = 16;
  static constexpr int kMostGroups = kPlainGdn ? 4 : 1;  // of a part
  // Their only query leaves seven columns of a product free: with NVFP4, column j holds the query's part in block j, so
  // that a row's eight sums are scaled after the product, not its 128 codes before.
  static constexpr bool kBlockColumns = kPlain && kRead == StateFormat::kE2m1;
  static constexpr int kMaxRounds = kMaxPartHeads / kWarps;
  static constexpr int kWeightPitch = 20;  // floats
  static constexpr int kWeightBytes = kPlain ? kMaxRounds * kWeightPitch * 4 : 0;

  // Stochastic rounding to float16 is long. Only plain decoding of Mamba-2 has registers for a copied run, for draws of both
  // of a run's pieces side by side, and for what a slab's draws share. There all of a slab is rounded before a read copy in
  // NVFP4 asks for the largest magnitude of the head, which other warps tell meanwhile.
  static constexpr bool kRoomy = kPlain && kRecurrence == StateFormat::kFloat16;
  static constexpr RunOrder kRunOrder = kRoomy                                 ? RunOrder::kCopied
                                        : kRecurrence == StateFormat::kFloat16 ? RunOrder::kMovedUp
                                                                               : RunOrder::kUnrolled;
  static constexpr int kPiecesAtOnce = kRoomy ? 2 : 1;
  static constexpr bool kRoundsFirst = kRoomy && kRead == StateFormat::kE2m1;
  // Codes of Mamba-2's float16 recurrences have a place of their own on their way out, so that the next slab comes early.
  static constexpr bool kOwnStage = !kGdn && kRecurrence == StateFormat::kFloat16;

  // Every slab of a head must be in some warp's registers while the head's largest magnitude is found: two of them never
  // in one's.
  static constexpr bool kWholeHead = kRead == StateFormat::kE2m1;
  static_assert(!kWholeHead || kWarps >= kSlabs, "a warp for each slab of a head");
  // A flush has the committed keys' columns in the order its fold takes them (tileKeys), unless it recalls from them.
  static constexpr bool kTiledKeys = !kGdn || kRecallsCodes;
  static_assert(kStateDim == 128, "fragments and FP8 blocks are laid out for 128 columns");
  static_assert(kHeadDim % 16 == 0 && kSlabs % kItemSlabs == 0, "whole slabs");
  static_assert(kMaxTokens >= 1 && kMaxTokens * kVectorsPerToken <= 8, "one tile of vectors");
};

// Byte offsets in a CTA's shared memory. The private areas of the warps come last.
struct NarrowLayout {
  int32_t partHeads, partGroups, dtPitch;
  // Of the part's first group; those of the next ones follow at multiples of groupBytes.
  int32_t keyOffset, queryOffset, factorOffset, normOffset, fragmentOffset, dotOffset, gramOffset, vectorOffset;
  int32_t groupBytes;
  int32_t dtOffset, scalarOffset, amaxOffset, weightOffset, betaOffset;
  int32_t privateOffset, privateBytes, totalBytes;
  int32_t stages, stageBytes, valueOffset;                            // of a private area while streaming heads
  int32_t slabScaleOffset, slabValueOffset, halfOffset, solveOffset, codeOffset;  // while flushing
  int32_t halfFactorOffset;
  int32_t pairBytes;  // fragments and dots of plain decoding without a flush: two of each, so far apart
};

template <class Traits>
constexpr NarrowLayout narrowLayout(int window, int tokens, int heads, int groups, int stages) {
  NarrowLayout s{};
  const int records = window + tokens;
  s.partHeads = heads;
  s.partGroups = groups;
  s.dtPitch = records;
  s.keyOffset = kBarrierArea;
  s.queryOffset = s.keyOffset + records * Traits::kKeyPitch;
  s.factorOffset = s.queryOffset + tokens * Traits::kKeyPitch;
  s.normOffset = s.factorOffset + (Traits::kGdn ? roundUp(records * 4, 16) : 0);
  s.fragmentOffset = s.normOffset + (Traits::kGdn ? 32 : 0);
  const int tiles = (window + 15) / 16;
  s.dotOffset = s.fragmentOffset + roundUp(tokens * Traits::kVectorsPerToken * (Traits::kStateDim * 2 + 4), 16);
  const int dotEnd = s.dotOffset + (tiles + (Traits::kGdn == Traits::kOneToken ? 0 : 1)) * 32 * 16;
  // For one token, the key products of a flush share their place with the fragments and dots of other steps.
  s.gramOffset = Traits::kOneToken ? s.fragmentOffset : dotEnd;
  const int gramEnd = s.gramOffset + (Traits::kGdn ? tiles * 16 * 16 * 4 : 0);
  s.vectorOffset = dotEnd > gramEnd ? dotEnd : gramEnd;
  s.pairBytes = Traits::kPlain ? dotEnd - s.fragmentOffset : 0;
  s.groupBytes = s.vectorOffset + (Traits::kRecallsCodes ? Traits::kVectorBytes : 0) + s.pairBytes - s.keyOffset;
  s.dtOffset = s.keyOffset + groups * s.groupBytes;
  s.scalarOffset = s.dtOffset + roundUp(heads * records * 4, 16);
  s.amaxOffset = s.scalarOffset + 3 * kMaxPartHeads * 4;  // a, D, head scale
  s.weightOffset = s.amaxOffset + kMaximumBytes;
  s.betaOffset = s.weightOffset + Traits::kWarps * Traits::kWeightBytes;
  s.halfFactorOffset = s.betaOffset + (Traits::kGdn ? roundUp(heads * records * 4, 16) : 0);
  s.privateOffset = roundUp(s.halfFactorOffset + (Traits::kRecallsCodes ? groups * 64 : 0), 128);

  s.stages = stages;
  s.valueOffset = Traits::kStateBytes + Traits::kScaleBytes;
  s.stageBytes = roundUp(s.valueOffset + window * Traits::kValuePitch, 128);

  s.slabScaleOffset = Traits::kSlabBytes + kItemBytes;
  s.slabValueOffset = s.slabScaleOffset + 16 * Traits::Recurrence::kScaleBytes;
  s.halfOffset = s.slabValueOffset + records * Traits::kSlabValuePitch;
  s.solveOffset = s.halfOffset + (Traits::kRecallsCodes ? 16 * groups / Traits::kWarps * Traits::kHalfPitch : 0);
  const int solveEnd = s.solveOffset + (heads + Traits::kWarps - 1) / Traits::kWarps * Traits::kSolveBytes;
  s.codeOffset = Traits::kOwnStage ? roundUp(solveEnd, 16) : 0;
  const int slab = Traits::kOwnStage ? s.codeOffset + Traits::kSlabBytes : solveEnd;

  // Plain decoding of GDN reads by way of areas of its own (read_gdn.cuh).
  const int streamed = Traits::kPlainGdn ? 0 : stages * s.stageBytes;
  s.privateBytes = roundUp(slab > streamed ? slab : streamed, 128);
  s.totalBytes = s.privateOffset + Traits::kWarps * s.privateBytes;
  return s;
}

}  // namespace replayssm
