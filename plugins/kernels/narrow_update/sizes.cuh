// What a multiprocessor holds, and how heads are cut into parts.
#pragma once

#include "../replay_update/dispatch.h"

namespace replayssm {

constexpr int kSharedBytes = 233472;   // of a multiprocessor
constexpr int kReservedBytes = 1024;   // of it, for each CTA
constexpr int kFewestParts = 4;        // parts a multiprocessor before heads share one

// CTAs of `bytes` dynamic shared memory on a multiprocessor.
constexpr int residentBlocks(int bytes) { return kSharedBytes / (bytes + kReservedBytes); }

RSSM_PORTABLE constexpr int partsOf(int heads, int partHeads) { return (heads + partHeads - 1) / partHeads; }

// Heads of a part of one group: as many as they may be while every multiprocessor gets several parts; 0: not those
// wished.
template <class Traits>
int choosePartHeads(const UpdateParams& p, const LaunchWish& wish) {
  auto heads = [&](int rounds) {
    return rounds * Traits::kWarps < p.headsPerGroup ? rounds * Traits::kWarps : p.headsPerGroup;
  };
  if (wish.pieceHeads > 0) {
    for (int rounds = Traits::kMaxRounds; rounds > 0; --rounds) {
      if (heads(rounds) == wish.pieceHeads) return wish.pieceHeads;
    }
    return 0;
  }
  const int64_t groups = static_cast<int64_t>(p.rows) * p.groups;
  int rounds = Traits::kMaxRounds;
  while (rounds > 1 && (partsOf(p.headsPerGroup, heads(rounds)) == partsOf(p.headsPerGroup, heads(rounds - 1)) ||
                        groups * partsOf(p.headsPerGroup, heads(rounds)) < int64_t{kFewestParts} * p.multiprocessors)) {
    --rounds;
  }
  return heads(rounds);
}

}  // namespace replayssm
