// Where plugin failures go: one callback of the host, standard error without one. TensorRT's own logger changed its ABI
// between major versions, so the library never calls it.
#pragma once

#include "replayssm/status.h"

namespace replayssm::trt {

// `plugin: method: message` to the host's callback. Never throws.
void report(const char* plugin, const char* method, const rssm_error& error) noexcept;

// An error record of one sentence; `status` is one of RSSM_*.
__attribute__((format(printf, 2, 3))) rssm_error failure(rssm_status status, const char* format, ...) noexcept;

}  // namespace replayssm::trt
