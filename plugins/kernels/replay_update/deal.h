// How heads are dealt out to persistent workers: a pure function.
#pragma once

#include <cstdint>

#include "params.h"
#include "wish.h"

namespace replayssm {

// Few heads: each worker one run, where the heads of a group can be cut like that.
inline int wholeShare(const UpdateParams& p, int workers, int pieceHeads) {
  const int items = p.rows * p.heads;
  for (int heads = pieceHeads; heads <= 4 && heads <= p.headsPerGroup; ++heads) {
    if (p.headsPerGroup % heads == 0 && items <= heads * workers) return heads;
  }
  return pieceHeads;
}

constexpr int kManyRounds = 20;

// How many of `rounds` rounds are left to whoever is ready: multiprocessors differ by a tenth, and in serving some have a
// group or two more than others that flush, each of which takes as long as two. So a sixth, and up to a third where that
// is less than sixteen heads a worker; of few groups, whose last pieces are single heads, the sixth.
inline int drawnRounds(int rounds, int roundHeads, bool few) {
  const int sixth = rounds >= kManyRounds ? rounds / 6 : 1, sixteen = (16 + roundHeads - 1) / roundHeads;
  const int third = rounds / 3 < sixteen ? rounds / 3 : sixteen;
  return few || sixth > third ? sixth : third;
}

// Runs of `usualRun` heads (0: whole groups) in turn while there are two groups and more for each worker, else runs of
// four, or, if that is not 0, of `fewRun` and pieces of one head. The rounds left over go in pieces, the last of them
// single heads. Pieces have `usualPiece` heads, where there are many rounds `manyPiece` if that is not 0. What is
// wished replaces the sizes of runs and pieces and the number of rounds left over; runs of another size than usual have
// pieces that divide them.
inline WorkDeal dealWork(const UpdateParams& p, int workers, int usualPiece, const LaunchWish& wish = {},
                         int usualRun = 0, int manyPiece = 0, int fewRun = 0) {
  WorkDeal deal{};
  const int items = p.rows * p.heads, groups = p.rows * p.groups;
  const bool few = groups < 2 * workers;
  const bool unasked = wish.runHeads == 0 && wish.pieceHeads == 0;
  const bool fine = unasked && few && fewRun > 0 && p.headsPerGroup % fewRun == 0;
  int pieceHeads = wish.pieceHeads > 0 ? wish.pieceHeads : wholeShare(p, workers, fine ? 1 : usualPiece);
  if (!few) {
    deal.roundHeads = usualRun > 0 && usualRun % pieceHeads == 0 ? usualRun : p.headsPerGroup;
  } else if (fine && pieceHeads == 1) {
    deal.roundHeads = fewRun;
  } else {
    deal.roundHeads = p.headsPerGroup % 4 == 0 ? 4 : pieceHeads;
  }
  if (wish.runHeads > 0) deal.roundHeads = wish.runHeads;
  const int rounds = items / deal.roundHeads / workers;
  const bool many = rounds >= kManyRounds;
  if (many && manyPiece > 0 && wish.pieceHeads == 0 && !fine) pieceHeads = manyPiece;
  if (wish.runHeads > 0 && wish.pieceHeads == 0 && wish.runHeads % pieceHeads != 0) pieceHeads = 1;
  deal.pieceHeads = pieceHeads;
  deal.rounds = rounds - (wish.drawnRounds > 0 ? wish.drawnRounds : drawnRounds(rounds, deal.roundHeads, few));
  if (deal.rounds < 0) deal.rounds = 0;
  deal.base = deal.rounds * workers * deal.roundHeads;
  const int rest = items - deal.base;
  const int singles = rest > int64_t{workers} * pieceHeads ? workers / pieceHeads * pieceHeads : 0;
  deal.large = (rest - singles) / pieceHeads;
  deal.pieces = deal.large + singles;
  return deal;
}

// Whether a wish can be dealt: no run or piece reaches into another group, and there are as many rounds to draw.
inline bool dealable(const UpdateParams& p, int workers, const WorkDeal& deal, const LaunchWish& wish) {
  const int rounds = p.rows * p.heads / deal.roundHeads / workers;
  return p.headsPerGroup % deal.roundHeads == 0 && p.headsPerGroup % deal.pieceHeads == 0 &&
         (deal.rounds == 0 || deal.roundHeads % deal.pieceHeads == 0) &&
         wish.drawnRounds <= (rounds < 1 ? 1 : rounds);
}

}  // namespace replayssm
