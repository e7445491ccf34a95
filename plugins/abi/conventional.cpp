// extern "C" face of the conventional step: validate, flatten to ConventionalParams, launch.
#include "replayssm/conventional.h"

#include <cuda_runtime_api.h>

#include "abi/check.h"
#include "kernels/conventional/params.h"

namespace replayssm {
namespace {

constexpr int kMaxConventionalTokens = 64;
constexpr int kHeadDimStep = 16;        // a warp's largest share of a head's rows
constexpr int64_t kMaxUnits = 1 << 30;  // B * H * P, keeps the grid within 32 bits

TokenTensor tokenTensor(const rssm_tensor& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }

void checkInputs(Checker& check, const rssm_conventional_args& a, int32_t act) {
  const int64_t* v = a.value.shape;
  check.tensor("value", a.value, act, {kAny, kAny, kAny, kAny});
  check.tensor("k", a.k, act, {v[0], v[1], kAny, kConventionalStateDim});
  check.tensor("q", a.q, act, {v[0], v[1], a.k.shape[2], kConventionalStateDim});
  if (a.kind == RSSM_MAMBA2) {
    check.tensor("dt", a.dt, RSSM_FLOAT32, {v[0], v[1], v[2]});
    check.tensor("a", a.a, RSSM_FLOAT32, {v[2]});
    check.contiguous("a", a.a, 0);
    if (a.skip.data != nullptr) {
      check.tensor("skip", a.skip, RSSM_FLOAT32, {v[2]});
      check.contiguous("skip", a.skip, 0);
    }
  } else {
    check.tensor("log_decay", a.log_decay, RSSM_FLOAT32, {v[0], v[1], v[2]});
    check.tensor("beta", a.beta, RSSM_FLOAT32, {v[0], v[1], v[2]});
  }
  check.tensor("out", a.out, act, {v[0], v[1], v[2], v[3]});
  check.contiguous("value", a.value, 3);
  check.contiguous("k", a.k, 3);
  check.contiguous("q", a.q, 3);
  check.aligned("k", a.k);
  check.aligned("q", a.q);
  check.contiguous("out", a.out, 3);
}

void checkState(Checker& check, const rssm_conventional_args& a) {
  const int64_t* v = a.value.shape;
  check.tensor("state", a.state, RSSM_FLOAT32, {kAny, kAny, v[2], v[3] * kConventionalStateDim});
  check.contiguous("state", a.state, 2);
  check.aligned("state", a.state);
  check.tensor("slot", a.slot, RSSM_INT32, {v[0]});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {v[0]});
  if (a.entry.data != nullptr) {
    check.tensor("entry", a.entry, RSSM_INT32, {a.state.shape[0]});
    check.contiguous("entry", a.entry, 0);
  }
  if (!check.ok()) return;
  const int64_t entries = a.state.shape[1], most = entries > 2 ? entries - 1 : 1;
  check.range("state: E", entries, 1, kMaxConventionalTokens + 1);
  if (check.ok() && v[1] > most) {
    check.fail(RSSM_INVALID_ARGUMENT, "value: T", "expected at most max(E - 1, 1) = %lld, got %lld",
               static_cast<long long>(most), static_cast<long long>(v[1]));
  }
}

void checkSizes(Checker& check, const rssm_conventional_args& a) {
  const int64_t heads = a.value.shape[2], headDim = a.value.shape[3], groups = a.k.shape[2];
  check.range("value: H", heads, 1, 4096);
  check.range("value: P", headDim, 1, 4096);
  if (!check.ok()) return;
  if (headDim % kHeadDimStep != 0) {
    check.fail(RSSM_UNSUPPORTED, "value: P", "expected a multiple of %d, got %lld", kHeadDimStep,
               static_cast<long long>(headDim));
  }
  check.range("value: B", a.value.shape[0], 0, kMaxUnits / (heads * headDim));
  if (check.ok() && (groups < 1 || heads % groups != 0)) {
    check.fail(RSSM_INVALID_ARGUMENT, "k: G", "expected groups that divide the %lld heads, got %lld",
               static_cast<long long>(heads), static_cast<long long>(groups));
  }
}

ConventionalParams flatten(const rssm_conventional_args& a) {
  ConventionalParams p{};
  p.rows = static_cast<int32_t>(a.value.shape[0]);
  p.tokens = static_cast<int32_t>(a.value.shape[1]);
  p.heads = static_cast<int32_t>(a.value.shape[2]);
  p.headDim = static_cast<int32_t>(a.value.shape[3]);
  p.headsPerGroup = p.heads / static_cast<int32_t>(a.k.shape[2]);
  p.entries = static_cast<int32_t>(a.state.shape[1]);
  p.gdn = a.kind == RSSM_GDN;
  p.half = a.value.dtype == RSSM_FLOAT16;
  p.programmaticLaunch = (a.flags & RSSM_CONVENTIONAL_PROGRAMMATIC_LAUNCH) != 0;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.entry = static_cast<const int32_t*>(a.entry.data);
  p.value = tokenTensor(a.value);
  p.k = tokenTensor(a.k);
  p.q = tokenTensor(a.q);
  p.dt = tokenTensor(p.gdn ? a.log_decay : a.dt);
  p.beta = tokenTensor(a.beta);
  p.a = static_cast<const float*>(a.a.data);
  p.skip = static_cast<const float*>(a.skip.data);
  p.out = a.out.data;
  p.outRowStride = a.out.stride[0];
  p.outTokenStride = a.out.stride[1];
  p.outHeadStride = a.out.stride[2];
  p.state = static_cast<float*>(a.state.data);
  p.stateSlotStride = a.state.stride[0];
  p.stateEntryStride = a.state.stride[1];
  return p;
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_conventional_update(const rssm_conventional_args* args, void* stream, rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_conventional_update", error);
  if (args == nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, "args", "expected a pointer, got null");
    return check.status();
  }
  const rssm_conventional_args& a = *args;
  check.header(a.struct_size, sizeof(rssm_conventional_args), a.abi_version);
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  if (!check.ok()) return check.status();
  checkInputs(check, a, a.value.dtype == RSSM_FLOAT16 ? RSSM_FLOAT16 : RSSM_BFLOAT16);
  if (check.ok()) checkSizes(check, a);
  if (check.ok()) checkState(check, a);
  if (!check.ok() || a.value.shape[0] == 0 || a.value.shape[1] == 0) return check.status();
  cudaError_t code = launchConventional(flatten(a), static_cast<cudaStream_t>(stream));
  if (code != cudaSuccess) check.fail(RSSM_CUDA_ERROR, "launch", "%s", cudaGetErrorString(code));
  return check.status();
}
