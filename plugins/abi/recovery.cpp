// extern "C" face of the recovery step: validate, flatten to RecoveryParams, launch.
#include "replayssm/recovery.h"

#include "abi/step_checks.h"

namespace replayssm {
namespace {

constexpr int32_t kActivation = RSSM_BFLOAT16;  // the only one that is measured

NamedInputs cachedInputs(const rssm_recovery_args& a) {
  return {"cached_value", "cached_k",   "cached_dt",         "cached_log_decay", "cached_beta",
          a.cached_value, a.cached_k,   a.cached_dt,         a.cached_log_decay, a.cached_beta};
}

void checkCached(Checker& check, const rssm_recovery_args& a) {
  const int64_t* v = a.value.shape;
  check.tensor("cached_value", a.cached_value, kActivation, {v[0], kAny, v[2], v[3]});
  check.tensor("replayed", a.replayed, RSSM_INT32, {v[0]});
  if (!check.ok()) return;
  check.range("cached_value: R", a.cached_value.shape[1], 0, kMaxBaselineTokens);
  checkTokenInputs(check, cachedInputs(a), a.kind, kActivation, a.k.shape[2]);
}

void checkState(Checker& check, const char* name, const rssm_tensor& t, const rssm_recovery_args& a, int64_t slots) {
  check.tensor(name, t, RSSM_FLOAT32, {slots, a.value.shape[2], a.value.shape[3] * kConventionalStateDim});
  check.contiguous(name, t, 1);
  check.aligned(name, t);
}

StateTensor stateTensor(const rssm_tensor& t) { return {static_cast<float*>(t.data), t.stride[0]}; }

RecoveryParams flatten(const rssm_recovery_args& a) {
  RecoveryParams p{};
  flattenStep(a, p);
  if (a.cached_value.data != nullptr) {
    p.maxReplayed = static_cast<int32_t>(a.cached_value.shape[1]);
    p.replayed = static_cast<const int32_t*>(a.replayed.data);
    p.replayedStride = a.replayed.stride[0];
    p.cached = flattenInputs(cachedInputs(a), rssm_tensor{}, p.gdn);
  }
  p.source = stateTensor(a.source);
  p.recovered = stateTensor(a.recovered);
  p.end = stateTensor(a.end);
  return p;
}

void checkRecovery(Checker& check, const rssm_recovery_args& a) {
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  if (check.ok()) checkStep(check, a, kActivation);
  if (check.ok() && a.cached_value.data != nullptr) checkCached(check, a);
  if (check.ok()) checkState(check, "source", a.source, a, kAny);
  if (check.ok() && a.recovered.data != nullptr) checkState(check, "recovered", a.recovered, a, a.source.shape[0]);
  if (check.ok() && a.end.data != nullptr) checkState(check, "end", a.end, a, a.source.shape[0]);
}

cudaError_t launch(const rssm_recovery_args& a, cudaStream_t stream) {
  if (a.value.shape[0] == 0) return cudaSuccess;
  RecoveryParams p = flatten(a);
  const cudaError_t code = findMultiprocessors(p.multiprocessors);
  return code == cudaSuccess ? launchRecovery(p, stream) : code;
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_recovery_step(const rssm_recovery_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_recovery_step", args, stream, error, replayssm::checkRecovery, replayssm::launch);
}
