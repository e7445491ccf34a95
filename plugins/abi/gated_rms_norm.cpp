// extern "C" face of the gated group norm: validate, flatten, launch.
#include "replayssm/gated_rms_norm.h"

#include "abi/alignment.h"
#include "abi/call.h"
#include "abi/views.h"
#include "kernels/gated_norm/params.h"

namespace replayssm {
namespace {

constexpr int kPiece = 8;  // channels of one 16-byte access
constexpr int64_t kMaxChannels = 1 << 24;
constexpr int64_t kMaxPlaces = INT32_MAX;  // B * T lies along a grid's first axis
constexpr int64_t kMaxGroups = 65535;      // groups along its second

void checkNorm(Checker& check, const rssm_gated_rms_norm_args& a) {
  const int32_t act = activationType(a.x);
  const int64_t* x = a.x.shape;
  check.range("gate_first", a.gate_first, 0, 1);
  check.tensor("x", a.x, act, {kAny, kAny, kAny});
  if (!check.ok()) return;
  check.range("x: D", x[2], 1, kMaxChannels);
  check.range("groups", a.groups, 1, x[2] < kMaxGroups ? x[2] : kMaxGroups);
  check.tensor("gate", a.gate, act, {x[0], x[1], x[2]});
  check.tensor("out", a.out, act, {x[0], x[1], x[2]});
  check.contiguous("x", a.x, 2);
  check.contiguous("gate", a.gate, 2);
  check.contiguous("out", a.out, 2);
  if (!check.ok()) return;
  if (x[2] % a.groups != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "groups", "expected a divisor of D = %lld, got %d", static_cast<long long>(x[2]),
               a.groups);
  }
  check.tensor("weight", a.weight, RSSM_FLOAT32, {a.gate_first ? x[2] : x[2] / a.groups});
  check.contiguous("weight", a.weight, 0);
  if (check.ok() && !(a.eps >= 0.0f)) {
    check.fail(RSSM_INVALID_ARGUMENT, "eps", "expected a number >= 0, got %g", static_cast<double>(a.eps));
  }
  if (check.ok() && x[1] > 0) check.range("x: B", x[0], 0, kMaxPlaces / x[1]);
}

// Whether rows and tokens of all three tensors lie evenly in memory, as B * T rows.
bool isEven(const rssm_gated_rms_norm_args& a) {
  for (const rssm_tensor* t : {&a.x, &a.gate, &a.out}) {
    if (t->shape[0] > 1 && t->shape[1] > 1 && t->stride[0] != t->shape[1] * t->stride[1]) return false;
  }
  return true;
}

// Of neighbouring places where tensors are even; the axis that has more than one place knows it.
int64_t placeStride(const rssm_tensor& t) { return t.shape[1] > 1 ? t.stride[1] : t.stride[0]; }

GatedNormParams flatten(const rssm_gated_rms_norm_args& a) {
  const bool even = isEven(a);
  GatedNormParams p{};
  p.places = a.x.shape[0] * a.x.shape[1];
  p.tokens = even ? 1 : static_cast<int32_t>(a.x.shape[1]);
  p.groups = a.groups;
  p.size = static_cast<int32_t>(a.x.shape[2] / a.groups);
  p.gateFirst = a.gate_first != 0;
  p.eps = a.eps;
  p.float16 = a.x.dtype == RSSM_FLOAT16;
  p.wide = p.size % kPiece == 0 && areAligned({&a.x, &a.gate, &a.out, &a.weight}, 16);
  p.programmaticLaunch = (a.flags & RSSM_NORM_PROGRAMMATIC_LAUNCH) != 0;
  p.x = a.x.data;
  p.xRowStride = even ? placeStride(a.x) : a.x.stride[0];
  p.xTokenStride = a.x.stride[1];
  p.gate = a.gate.data;
  p.gateRowStride = even ? placeStride(a.gate) : a.gate.stride[0];
  p.gateTokenStride = a.gate.stride[1];
  p.weight = static_cast<const float*>(a.weight.data);
  p.out = a.out.data;
  p.outRowStride = even ? placeStride(a.out) : a.out.stride[0];
  p.outTokenStride = a.out.stride[1];
  return p;
}

cudaError_t launch(const rssm_gated_rms_norm_args& a, cudaStream_t stream) {
  GatedNormParams p = flatten(a);
  if (p.places == 0) return cudaSuccess;
  const cudaError_t code = findMultiprocessors(p.multiprocessors);
  return code == cudaSuccess ? launchGatedNorm(p, stream) : code;
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_gated_rms_norm(const rssm_gated_rms_norm_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_gated_rms_norm", args, stream, error, replayssm::checkNorm, replayssm::launch);
}
