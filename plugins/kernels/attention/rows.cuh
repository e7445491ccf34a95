// Which tokens of a row exist. Ids and positions out of range do no harm: such a row has no tokens.
#pragma once

#include <cstdint>

namespace replayssm {

template <class Params>
__device__ __forceinline__ int existingTokens(const Params& p, int row) {
  const int slot = p.slot[row], start = p.start[row], tokens = min(p.numTokens[row], p.tokens);
  const bool inRange = slot >= 0 && slot < p.slots && start >= 0 && tokens >= 0 && start <= p.depth - tokens;
  return inRange ? tokens : 0;
}

}  // namespace replayssm
