// What every move of the cursors takes: rows with their tokens, and the registers of all slots.
#pragma once

#include "abi/check.h"

namespace replayssm {

// On failure check.ok() is false.
inline void checkCursorMove(Checker& check, const rssm_tensor& slot, const rssm_tensor& numTokens,
                            const rssm_tensor& origin, const rssm_tensor& h, const rssm_tensor& position) {
  check.tensor("slot", slot, RSSM_INT32, {kAny});
  check.range("slot: B", slot.shape[0], 0, INT32_MAX / 2);
  check.tensor("num_tokens", numTokens, RSSM_INT32, {slot.shape[0]});
  check.tensor("origin", origin, RSSM_INT32, {kAny});
  check.tensor("h", h, RSSM_INT32, {origin.shape[0]});
  check.tensor("position", position, RSSM_INT32, {origin.shape[0]});
  check.contiguous("origin", origin, 0);
  check.contiguous("h", h, 0);
  check.contiguous("position", position, 0);
}

}  // namespace replayssm
