// Compile-time choices of the update of Mamba-2, and the shared-memory layout that follows from them (item.cuh has the
// terms). A team is one producer warp and kWarps consumer warps; an item is one head's state (P rows of N floats) with its
// records, in a stage. Keys and queries lie in the team's key buffers.
#pragma once

#include "item.cuh"

namespace replayssm {

constexpr int kMaxStages = 6;      // of a team
constexpr int kMaxKeyBuffers = 2;  // of a team
constexpr int kSharedBudget = 232448;  // bytes a CTA may take on sm_90
constexpr int kBarrierBytes = 128;  // of a team

using ItemHeader = ItemHeaderOf<30>;  // the ordinal is the chunk's within the team
struct SharedLayout;

template <Family kFamily_, class Act_, int kHeadDim_, int kStateDim_, int kTeams_, int kMaxTokens_>
struct UpdateTraits {
  static_assert(kFamily_ == Family::mamba2, "GDN has kernels of its own");
  static constexpr bool kGdn = false;  // for the read-out, which all share: a token has one vector
  using Act = Act_;
  using Header = ItemHeader;
  using Layout = SharedLayout;
  static constexpr int kHeadDim = kHeadDim_;        // P
  static constexpr int kStateDim = kStateDim_;      // N
  static constexpr int kTeams = kTeams_;            // independent teams of a CTA
  static constexpr int kMaxTokens = kMaxTokens_;    // T the kernel is built for
  static constexpr bool kSingle = kMaxTokens == 1;  // plain decoding: the state is read by float32 FMA
  // The state is multiplied by vectors, the tokens' queries, in tiles of 8.
  static constexpr int kVectorsPerToken = 1;
  static constexpr int kTiles = (kMaxTokens + 7) / 8;
  static constexpr int kTilePairs = (kTiles + 1) / 2;
  static constexpr int kTokenSteps = (kMaxTokens + 7) / 8;  // this step's tokens as records, in tiles of 8
  static constexpr int kParts = 1;                  // items of a head
  static constexpr int kRows = kHeadDim;            // state rows of an item
  static constexpr int kWarps = kRows / kSlab;   // consumer warps of a team; its last warp is the producer
  static constexpr int kThreads = 32 * kTeams * (kWarps + 1);
  static constexpr int kBlocks = kStateDim / kBlock;

  // Row pitches in bytes: the rings', for bulk copies. Two rows share banks; that costs less than copies by pieces.
  static constexpr int kKeyPitch = kStateDim * 2;
  static constexpr int kValuePitch = kHeadDim * 2;
  static constexpr int kStateBytes = kHeadDim * kStateDim * 4;

  static_assert(sizeof(Act) == 2, "activations are 16-bit");
  static_assert(kHeadDim % kSlab == 0, "a warp owns 16 whole state rows of one head");
  static_assert(kStateDim % kBlock == 0, "a lane reads 8 contiguous columns of a 32-column block");
  static_assert(kThreads <= 1024, "one CTA of at most 32 warps");
  static_assert(kMaxTokens >= 1 && kMaxTokens <= 16, "a header counts at most 16 tokens a row");
};

// Byte offsets of one stage and of a team's share. `records` = window + T rows of every record array.
struct SharedLayout {
  int32_t records;
  int32_t valueOffset, dtOffset, scalarOffset, headerOffset, stageBytes;
  int32_t queryOffset, keyBufferBytes, keyBuffers, stages;
  int32_t teamBytes;

  constexpr __host__ __device__ int32_t keyOffset(int buffer) const { return kBarrierBytes + buffer * keyBufferBytes; }
  constexpr __host__ __device__ int32_t stageOffset(int stage) const {
    return kBarrierBytes + keyBuffers * keyBufferBytes + stage * stageBytes;
  }
};

// Two key buffers hide a chunk's start; with little room one buffer and one more stage serve better.
template <class Traits>
constexpr __host__ __device__ SharedLayout sharedLayout(int window, int tokens) {
  SharedLayout s{};
  s.records = window + tokens;
  s.valueOffset = Traits::kStateBytes;
  s.dtOffset = s.valueOffset + s.records * Traits::kValuePitch;
  s.scalarOffset = s.dtOffset + (s.records * 4 + 15) / 16 * 16;
  s.headerOffset = s.scalarOffset + 16;  // a and D
  s.stageBytes = (s.headerOffset + static_cast<int>(sizeof(ItemHeader)) + 127) / 128 * 128;
  s.queryOffset = s.records * Traits::kKeyPitch;
  s.keyBufferBytes = (s.queryOffset + tokens * Traits::kKeyPitch + 127) / 128 * 128;
  const int share = kSharedBudget / Traits::kTeams / 128 * 128 - kBarrierBytes;
  const int stagesBesideTwo = (share - 2 * s.keyBufferBytes) / s.stageBytes;
  const int stagesBesideOne = (share - s.keyBufferBytes) / s.stageBytes;
  const bool one = stagesBesideTwo < 3 && stagesBesideOne > stagesBesideTwo;
  s.keyBuffers = one ? 1 : 2;
  s.stages = one ? stagesBesideOne : stagesBesideTwo;
  if (s.stages > kMaxStages) s.stages = kMaxStages;
  s.teamBytes = s.stageOffset(s.stages);
  return s;
}

}  // namespace replayssm
