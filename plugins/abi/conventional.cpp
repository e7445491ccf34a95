// extern "C" face of the conventional step: validate, flatten to ConventionalParams, launch.
#include "replayssm/conventional.h"

#include <cstdio>

#include "abi/step_checks.h"

namespace replayssm {
namespace {

void checkState(Checker& check, const rssm_conventional_args& a) {
  const int64_t* v = a.value.shape;
  check.tensor("state", a.state, RSSM_FLOAT32, {kAny, kAny, v[2], v[3] * kConventionalStateDim});
  check.contiguous("state", a.state, 2);
  check.aligned("state", a.state);
  if (a.entry.data != nullptr) {
    check.tensor("entry", a.entry, RSSM_INT32, {a.state.shape[0]});
    check.contiguous("entry", a.entry, 0);
  }
  if (!check.ok()) return;
  const int64_t entries = a.state.shape[1], most = entries > 2 ? entries - 1 : 1;
  check.range("state: E", entries, 1, kMaxBaselineTokens + 1);
  if (check.ok() && v[1] > most) {
    check.fail(RSSM_INVALID_ARGUMENT, "value: T", "expected at most max(E - 1, 1) = %lld, got %lld",
               static_cast<long long>(most), static_cast<long long>(v[1]));
  }
}

ConventionalParams flatten(const rssm_conventional_args& a) {
  ConventionalParams p{};
  flattenStep(a, p);
  p.programmaticLaunch = (a.flags & RSSM_CONVENTIONAL_PROGRAMMATIC_LAUNCH) != 0;
  p.settled = p.programmaticLaunch && (a.flags & RSSM_CONVENTIONAL_SETTLED_STATE) != 0;
  p.entry = static_cast<const int32_t*>(a.entry.data);
  p.slots = static_cast<int32_t>(a.state.shape[0]);
  p.entries = static_cast<int32_t>(a.state.shape[1]);
  p.state = {static_cast<float*>(a.state.data), a.state.stride[0]};
  p.entryStride = a.state.stride[1];
  return p;
}

void checkConventional(Checker& check, const rssm_conventional_args& a) {
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  if (check.ok()) checkStep(check, a, activationType(a.value));
  if (check.ok()) checkState(check, a);
}

cudaError_t launch(const rssm_conventional_args& a, cudaStream_t stream) {
  if (a.value.shape[0] == 0 || a.value.shape[1] == 0) return cudaSuccess;
  ConventionalParams p = flatten(a);
  const cudaError_t code = findMultiprocessors(p.multiprocessors);
  return code == cudaSuccess ? launchConventional(p, stream) : code;
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_conventional_update(const rssm_conventional_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_conventional_update", args, stream, error, replayssm::checkConventional,
                                replayssm::launch);
}

rssm_status rssm_conventional_launch_text(const rssm_conventional_args* args, int32_t multiprocessors, char* text,
                                          size_t text_bytes, rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_conventional_launch_text", error);
  if (checkArguments(check, args)) checkConventional(check, *args);
  check.range("multiprocessors", multiprocessors, 1, 1 << 16);
  if (check.ok() && (text == nullptr || text_bytes == 0)) {
    check.fail(RSSM_INVALID_ARGUMENT, "text", "expected a buffer, got none");
  }
  if (!check.ok()) return check.status();
  ConventionalParams p = flatten(*args);
  p.multiprocessors = multiprocessors;
  const ConventionalLaunch launch = chooseConventional(p);
  std::snprintf(text, text_bytes, "conventional: %d CTAs of %d warps, %d state rows a warp", launch.grid, launch.warps,
                launch.stateRows);
  return check.status();
}
