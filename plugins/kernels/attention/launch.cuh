// A launch of the attention over items, by whichever kernel.
#pragma once

#include "kernels/common/launch.cuh"
#include "params.h"

namespace replayssm {

inline int queryRows(const AttentionParams& p) { return p.tokens * (p.heads / p.kvHeads); }

template <class Traits>
int rowBlocks(const AttentionParams& p) {
  return (queryRows(p) + Traits::kRows - 1) / Traits::kRows;
}

template <class Traits, class Kernel>
cudaError_t launchItems(Kernel kernel, const AttentionParams& p, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(p.rows) * p.kvHeads * rowBlocks<Traits>(p) * p.splits;
  const int64_t blocks = static_cast<int64_t>(p.multiprocessors) * Traits::kBlocks;
  return launchLarge(stream, p.programmaticLaunch, kernel, dim3(static_cast<unsigned>(items < blocks ? items : blocks)),
                     Traits::kThreads, Traits::kShared, p, static_cast<int>(items));
}

}  // namespace replayssm
