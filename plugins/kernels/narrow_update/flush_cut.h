// How the rows that flush are cut into parts, each of which all warps of a CTA fold together: a pure function.
#pragma once

#include "../common/portable.cuh"

namespace replayssm {

// A part: `groups` groups with all their heads, or of one group as many as `heads` heads.
struct FlushCut {
  int groups, heads;

  RSSM_PORTABLE int partsOfRow(int rowGroups, int headsPerGroup) const {
    return rowGroups / groups * ((headsPerGroup * groups + heads - 1) / heads);
  }
};

// The largest parts where each CTA has two and more of them: a part's start costs about a head's time. In serving one row in
// sixteen flushes: of the largest parts, their halves and so on, those that CTAs, which take them in turn, are done with first.
RSSM_PORTABLE FlushCut cutFlushes(int rows, int rowGroups, int headsPerGroup, FlushCut most, int ctas) {
  FlushCut best = most, cut = most;
  if (rows * most.partsOfRow(rowGroups, headsPerGroup) >= 2 * ctas) return most;
  int least = INT32_MAX;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  while (true) {
    const int parts = rows * cut.partsOfRow(rowGroups, headsPerGroup);
    const int cost = (parts + ctas - 1) / ctas * (cut.heads + 1);
    if (cost < least) {
      best = cut;
      least = cost;
    }
    if (cut.heads == 1) return best;
    cut.heads = (cut.heads + 1) / 2;
    if (cut.groups > 1) cut.groups /= 2;
  }
}

}  // namespace replayssm
