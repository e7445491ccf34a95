#include "trt/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "replayssm/trt.h"

namespace replayssm::trt {
namespace {

// The one piece of process-wide state: hosts load this library once and share it between engines.
std::atomic<rssm_trt_log> hostLog{nullptr};

}  // namespace

void report(const char* plugin, const char* method, const rssm_error& error) noexcept {
  rssm_error line = failure(error.status, "%s: %s: %s", plugin, method, error.message);
  rssm_trt_log log = hostLog.load();
  if (log != nullptr) {
    log(&line);
  } else {
    std::fprintf(stderr, "[trtllm_replayssm] %s\n", line.message);
  }
}

rssm_error failure(rssm_status status, const char* format, ...) noexcept {
  rssm_error error{};
  error.status = status;
  va_list values;
  va_start(values, format);
  std::vsnprintf(error.message, sizeof(error.message), format, values);
  va_end(values);
  return error;
}

}  // namespace replayssm::trt

void rssm_trt_set_log(rssm_trt_log log) { replayssm::trt::hostLog.store(log); }
