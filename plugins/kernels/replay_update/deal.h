// How heads are dealt out to persistent workers: a pure function.
#pragma once

#include "params.h"

namespace replayssm {

// Few heads: each worker one run, where the heads of a group can be cut like that.
inline int wholeShare(const UpdateParams& p, int workers, int pieceHeads) {
  const int items = p.rows * p.heads;
  for (int heads = pieceHeads; heads <= 4 && heads <= p.headsPerGroup; ++heads) {
    if (p.headsPerGroup % heads == 0 && items <= heads * workers) return heads;
  }
  return pieceHeads;
}

// Whole groups in turn while there are two and more for each worker, else runs of four heads; of either all but the last
// whole round, so that the rest can go to whoever is ready, in pieces, the last of them single heads.
inline WorkDeal dealWork(const UpdateParams& p, int workers, int pieceHeads) {
  WorkDeal deal{};
  const int items = p.rows * p.heads, groups = p.rows * p.groups;
  pieceHeads = wholeShare(p, workers, pieceHeads);
  deal.pieceHeads = pieceHeads;
  deal.roundHeads = groups >= 2 * workers ? p.headsPerGroup : p.headsPerGroup % 4 == 0 ? 4 : pieceHeads;
  deal.rounds = items / deal.roundHeads / workers - 1;
  if (deal.rounds < 0) deal.rounds = 0;
  deal.base = deal.rounds * workers * deal.roundHeads;
  const int rest = items - deal.base;
  const int singles = rest > workers * pieceHeads ? workers / pieceHeads * pieceHeads : 0;
  deal.large = (rest - singles) / pieceHeads;
  deal.pieces = deal.large + singles;
  return deal;
}

}  // namespace replayssm
