// What a layer is asked for: the extent of the input `phase` tells it without reading the device.
#pragma once

#include "replayssm/tensor.h"
#include "trt/log.h"

namespace replayssm::trt {

enum class Phase : int64_t { kStep = 1, kPrompt = 2 };  // a decode or verify step, a prompt chunk

inline Phase phaseOf(const rssm_tensor& phase) { return static_cast<Phase>(phase.shape[0]); }

inline rssm_status refusePhase(const rssm_tensor& phase, rssm_error& error) {
  error = failure(RSSM_INVALID_ARGUMENT, "phase: expected an extent of 1 (step) or 2 (prompt chunk), got %lld",
                  static_cast<long long>(phase.shape[0]));
  return error.status;
}

inline bool stepTokensFit(int64_t tokens, int32_t most, rssm_error& error) {
  if (tokens <= most) return true;
  error = failure(RSSM_INVALID_ARGUMENT, "a step has at most max_step_tokens = %d tokens a row, got %lld", most,
                  static_cast<long long>(tokens));
  return false;
}

}  // namespace replayssm::trt
