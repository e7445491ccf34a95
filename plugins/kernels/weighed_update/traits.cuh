// Compile-time choices of the update of GDN, and the shared-memory layout that follows from them (../replay_update/item.cuh
// has the terms). A team is one producer warp, recorders and kSets sets of kWarps consumer warps; an item is one of the
// kParts equal parts of a head's state (kRows rows of N floats). The sets take items in turn and see no others, so that one
// item's latency hides behind the others; each warp of a set owns kSlab rows of its items. The records of a head travel
// into a slot of a second ring, keys and queries through the team's key buffers, headers of heads through a ring of theirs.
#pragma once

#include "../replay_update/item.cuh"

namespace replayssm::weighed {

constexpr int kMaxStages = 6;      // of a team
constexpr int kSharedBudget = 232448;  // bytes a CTA may take on sm_90
constexpr int kMaxKeyBuffers = 3;   // of a team
constexpr int kMaxSlots = 9;        // of a team
constexpr int kHeads = 12;          // headers of heads of a team
constexpr int kBarrierBytes = 480;  // of a team
constexpr int kControlBytes = 896;  // of a team: barriers, headers of the stages and of the heads
constexpr int kItemElements = 10240;  // of the state, at most: small items leave room for several stages

// The fewest equal parts of whole slabs that a head's state is cut into.
constexpr int itemParts(int headDim, int stateDim) {
  for (int parts = 1; parts < headDim / kSlab; ++parts) {
    if (headDim % (parts * kSlab) == 0 && headDim / parts * stateDim <= kItemElements) return parts;
  }
  return headDim / kSlab;
}

// Warps of a CTA: 16 of 128 registers, or 8 of 255 where the vectors that the state is multiplied by, or the sums, need
// many.
constexpr int residentWarps(int tiles, int blocks) { return tiles <= 2 && tiles * blocks <= 8 ? 16 : 8; }

// Sets of consumers of a team that leave room for `others` warps.
constexpr int consumerSets(int teamWarps, int others, int warps) {
  return (teamWarps - others) / warps < 1 ? 1 : (teamWarps - others) / warps;
}

using ItemHeader = ItemHeaderOf<24>;  // the ordinal is the part's within the head
struct SharedLayout;

// Where an item's records and keys lie, with the parity of that slot's and key buffer's current use.
struct ItemPlace {
  uint32_t packed;
  static __device__ ItemPlace make(int slot, uint32_t slotParity, int keys, uint32_t keysParity) {
    return {static_cast<uint32_t>(slot) | slotParity << 7 | static_cast<uint32_t>(keys) << 8 | keysParity << 15};
  }
  __device__ int slot() const { return static_cast<int>(packed & 127u); }
  __device__ uint32_t slotParity() const { return packed >> 7 & 1u; }
  __device__ int keys() const { return static_cast<int>(packed >> 8 & 127u); }
  __device__ uint32_t keysParity() const { return packed >> 15; }
};

// What lies beside a stage. `number` counts the team's items.
struct __align__(16) StageHeader {
  ItemHeader item;
  uint32_t number;
  ItemPlace place;
};

template <Family kFamily_, class Act_, int kHeadDim_, int kStateDim_, int kTeams_, int kMaxTokens_>
struct UpdateTraits {
  static_assert(kFamily_ == Family::gdn, "Mamba-2 has kernels of its own");
  static constexpr bool kGdn = true;  // for the read-out, which both share: a token has two vectors
  using Act = Act_;
  using Header = ItemHeader;
  using Layout = SharedLayout;
  static constexpr int kHeadDim = kHeadDim_;        // P
  static constexpr int kStateDim = kStateDim_;      // N
  static constexpr int kTeams = kTeams_;            // independent teams of a CTA
  static constexpr int kMaxTokens = kMaxTokens_;    // T the kernel is built for
  // The state is multiplied by vectors, in tiles of 8: a token's query, for GDN its key and its query side by side.
  static constexpr int kVectorsPerToken = 2;
  static constexpr int kTiles = (kMaxTokens * kVectorsPerToken + 7) / 8;
  static constexpr int kBlocks = kStateDim / kBlock;
  static constexpr int kTilePairs = (kTiles + 1) / 2;
  static constexpr int kTokenSteps = (kMaxTokens + 7) / 8;  // this step's tokens as records, in tiles of 8
  static constexpr int kParts = itemParts(kHeadDim, kStateDim);  // items of a head
  static constexpr int kRows = kHeadDim / kParts;   // state rows of an item
  static constexpr int kWarps = kRows / kSlab;      // consumer warps of a set
  // Recorders: one fetches heads' records, weighers weigh them for all of a head's consumers.
  static constexpr int kSets = consumerSets(residentWarps(kTiles, kBlocks) / kTeams, 3, kWarps);
  static constexpr int kSpareWarps = residentWarps(kTiles, kBlocks) / kTeams - 1 - kSets * kWarps;
  static constexpr int kWeighers = kSpareWarps - 1;
  static constexpr int kTeamWarps = kSets * kWarps + kSpareWarps + 1;  // consumers, recorders, the producer
  static constexpr int kThreads = 32 * kTeams * kTeamWarps;
  static_assert(kWeighers >= 1, "a warp to weigh beside the one that fetches");
  static_assert(kMaxSlots + kWeighers < kHeads, "a header of a head stays until every recorder has read it");

  // Row pitches in bytes: records lie in shared memory as in the ring, so that committed ones come in bulk.
  static constexpr int kKeyPitch = kStateDim * 2;
  static constexpr int kValuePitch = kHeadDim * 2;
  static constexpr int kStateBytes = kRows * kStateDim * 4;  // of an item
  // Weights of a head, a row of floats for each record; the pitch spreads fragments over the banks.
  static constexpr int kVectors = 8 * kTiles;
  static constexpr int kWeightPitch = kMaxTokens == 1 ? 4 : kVectors + 4;  // one token: floats from 4 on are waste

  static_assert(sizeof(Act) == 2, "activations are 16-bit");
  static_assert(kHeadDim % kSlab == 0, "a warp owns 16 whole state rows of one head");
  static_assert(kStateDim % kBlock == 0, "a lane reads 8 contiguous columns of a 32-column block");
  static_assert(kThreads <= 1024, "one CTA of at most 32 warps");
  static_assert(kMaxTokens >= 1 && kMaxTokens <= 16, "a header counts at most 16 tokens a row");
};

// Where a head's results go: output of its first token, its ring of corrections; both of the head's first row.
struct HeadTargets {
  void* out;
  void* ring;
};

// Byte offsets within a slot and a key buffer, and of a team's share. `records` = window + T rows of every record array.
// States and records are aligned to 128 bytes: a bulk copy to another address is slow.
struct SharedLayout {
  int32_t records, stages;
  int32_t dtOffset, scalarOffset, targetOffset, weightOffset, slotBytes, slots;  // slot: values, dt, beta, where to, weights
  // Key buffer: keys, queries, factors of committed keys, products of keys and queries.
  int32_t queryOffset, factorOffset, productOffset, keyBufferBytes, keyBuffers;
  int32_t stageStart, slotStart, teamBytes;

  constexpr __host__ __device__ int32_t headerPlace(int stage) const { return kBarrierBytes + stage * 32; }
  constexpr __host__ __device__ int32_t headPlace(int head) const { return headerPlace(kMaxStages) + head * 16; }
  constexpr __host__ __device__ int32_t keyPlace(int buffer) const { return kControlBytes + buffer * keyBufferBytes; }
};

// As many stages as fit beside `keyBuffers`. A stage is free when its state has been read, a slot when its head is done.
// HAZARD: consumers wait for the barriers of slots that they have not followed. Once an item is sent, all are done that are
// that many stages and sets further back; so many slots put a slot's last head among them.
template <class Traits>
constexpr __host__ __device__ SharedLayout withStages(SharedLayout s, int keyBuffers) {
  const int share = kSharedBudget / Traits::kTeams / 128 * 128;
  s.keyBuffers = keyBuffers;
  s.stageStart = s.keyPlace(keyBuffers);
  for (s.stages = kMaxStages; s.stages > 0; --s.stages) {
    const int behind = Traits::kSets < 3 ? 3 : Traits::kSets;
    s.slots = (s.stages + behind + Traits::kParts - 1) / Traits::kParts;
    s.slotStart = s.stageStart + s.stages * Traits::kStateBytes;
    s.teamBytes = s.slotStart + s.slots * s.slotBytes;
    if (s.teamBytes <= share) break;
  }
  return s;
}

// Two or three key buffers hide a chunk's start; with little room one buffer and one more stage serve better.
template <class Traits>
constexpr __host__ __device__ SharedLayout sharedLayout(int window, int tokens) {
  SharedLayout s{};
  s.records = window + tokens;
  s.dtOffset = s.records * Traits::kValuePitch;
  s.scalarOffset = s.dtOffset + roundUp(s.records * 4, 16);
  s.targetOffset = s.scalarOffset + roundUp(Traits::kMaxTokens * 4, 16);
  s.weightOffset = s.targetOffset + static_cast<int>(sizeof(HeadTargets));
  const int weightRows = 1 + roundUp(window, 8) + Traits::kMaxTokens;
  const int weightBytes = (weightRows * Traits::kWeightPitch + 4) * 4;  // the last row of one token is eight floats, too
  s.slotBytes = roundUp(s.weightOffset + weightBytes, 128);
  s.queryOffset = s.records * Traits::kKeyPitch + 64;  // a lane's columns of a key and of a query are on other banks
  s.factorOffset = s.queryOffset + tokens * Traits::kKeyPitch;
  s.productOffset = s.factorOffset + roundUp(s.records * 4, 16);
  s.keyBufferBytes = roundUp(s.productOffset + weightBytes, 128);
  const SharedLayout three = withStages<Traits>(s, 3), two = withStages<Traits>(s, 2), one = withStages<Traits>(s, 1);
  if (two.stages < 3 && one.stages > two.stages) return one;
  return three.stages == two.stages ? three : two;
}

}  // namespace replayssm::weighed
