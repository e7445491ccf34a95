// extern "C" face of norm and activation: validate, flatten, launch.
#include "replayssm/elementwise.h"

#include "abi/alignment.h"
#include "abi/call.h"
#include "abi/views.h"
#include "kernels/elementwise/params.h"

namespace replayssm {
namespace {

constexpr int kPiece = 8;  // channels of one 16-byte access
constexpr int64_t kMaxChannels = 1 << 24;
constexpr int64_t kMaxRows = INT32_MAX;

constexpr int64_t kMaxParts = 64;

bool hasParts(const rssm_rms_norm_args& a) { return a.x.rank == 3 && a.x.dtype == RSSM_FLOAT32; }

void checkNorm(Checker& check, const rssm_rms_norm_args& a) {
  const bool parts = hasParts(a);
  const int32_t act = activationType(parts ? a.residual : a.x);
  if (parts) {
    check.tensor("x", a.x, RSSM_FLOAT32, {kAny, kAny, kAny});
    if (check.ok()) check.range("x: parts", a.x.shape[0], 1, kMaxParts);
  } else {
    check.tensor("x", a.x, act, {kAny, kAny});
  }
  if (!check.ok()) return;
  const int64_t rows = a.x.shape[parts ? 1 : 0], size = a.x.shape[parts ? 2 : 1];
  check.range("x: R", rows, 0, kMaxRows);
  check.range("x: D", size, 1, kMaxChannels);
  check.tensor("out", a.out, act, {rows, size});
  check.tensor("weight", a.weight, RSSM_FLOAT32, {size});
  check.contiguous("x", a.x, parts ? 2 : 1);
  check.contiguous("out", a.out, 1);
  check.contiguous("weight", a.weight, 0);
  if (parts || !isAbsent(a.residual)) {
    check.tensor("residual", a.residual, act, {rows, size});
    check.tensor("sum", a.sum, act, {rows, size});
    check.contiguous("residual", a.residual, 1);
    check.contiguous("sum", a.sum, 1);
  } else if (check.ok() && !isAbsent(a.sum)) {
    check.fail(RSSM_INVALID_ARGUMENT, "sum", "expected null (there is no residual), got a tensor");
  }
  if (check.ok() && !(a.eps >= 0.0f)) {
    check.fail(RSSM_INVALID_ARGUMENT, "eps", "expected a number >= 0, got %g", static_cast<double>(a.eps));
  }
}

RmsNormParams flatten(const rssm_rms_norm_args& a) {
  RmsNormParams p{};
  const bool parts = hasParts(a);
  p.rows = a.out.shape[0];
  p.size = static_cast<int32_t>(a.out.shape[1]);
  p.eps = a.eps;
  p.weightOffset = a.weight_offset;
  p.float16 = a.out.dtype == RSSM_FLOAT16;
  p.parts = parts ? static_cast<int32_t>(a.x.shape[0]) : 0;
  p.partStride = parts ? a.x.stride[0] : 0;
  p.wide = p.size % kPiece == 0 && areAligned({&a.x, &a.residual, &a.weight, &a.sum, &a.out}, 16);
  p.programmaticLaunch = (a.flags & RSSM_ELEMENTWISE_PROGRAMMATIC_LAUNCH) != 0;
  p.x = a.x.data;
  p.residual = a.residual.data;
  p.weight = static_cast<const float*>(a.weight.data);
  p.sum = a.sum.data;
  p.out = a.out.data;
  p.xStride = a.x.stride[parts ? 1 : 0];
  p.outStride = a.out.stride[0];
  if (p.residual != nullptr) {
    p.residualStride = a.residual.stride[0];
    p.sumStride = a.sum.stride[0];
  }
  return p;
}

void checkActivation(Checker& check, const rssm_activation_args& a) {
  const int32_t act = activationType(a.x);
  check.range("function", a.function, RSSM_SILU, RSSM_RELU2);
  check.tensor("x", a.x, act, {kAny, kAny, kAny});
  if (!check.ok()) return;
  const int64_t* x = a.x.shape;
  check.range("x: R", x[0], 0, kMaxRows);
  check.range("x: D", x[2], 1, kMaxChannels);
  if (check.ok()) check.range("x: G", x[1], 0, kMaxChannels / x[2]);
  check.tensor("out", a.out, act, {x[0], x[1], x[2]});
  check.contiguous("x", a.x, 2);
  check.contiguous("out", a.out, 2);
  if (!isAbsent(a.factor)) {
    check.tensor("factor", a.factor, act, {x[0], x[1], x[2]});
    check.contiguous("factor", a.factor, 2);
  }
  if (!isAbsent(a.opening)) check.tensor("opening", a.opening, RSSM_FLOAT32, {x[0]});
}

ActivationParams flatten(const rssm_activation_args& a) {
  ActivationParams p{};
  p.rows = a.x.shape[0];
  p.groups = static_cast<int32_t>(a.x.shape[1]);
  p.size = static_cast<int32_t>(a.x.shape[2]);
  p.function = a.function;
  p.float16 = a.x.dtype == RSSM_FLOAT16;
  p.wide = p.size % kPiece == 0 && areAligned({&a.x, &a.factor, &a.out}, 16);
  p.programmaticLaunch = (a.flags & RSSM_ELEMENTWISE_PROGRAMMATIC_LAUNCH) != 0;
  p.x = a.x.data;
  p.factor = a.factor.data;
  p.out = a.out.data;
  p.xStride = a.x.stride[0];
  p.xGroupStride = a.x.stride[1];
  p.outStride = a.out.stride[0];
  p.outGroupStride = a.out.stride[1];
  if (p.factor != nullptr) {
    p.factorStride = a.factor.stride[0];
    p.factorGroupStride = a.factor.stride[1];
  }
  p.opening = static_cast<const float*>(a.opening.data);
  if (p.opening != nullptr) p.openingStride = a.opening.stride[0];
  return p;
}

cudaError_t launchChosen(ActivationParams p, cudaStream_t stream) {
  const cudaError_t code = findMultiprocessors(p.multiprocessors);
  return code == cudaSuccess ? launchActivation(p, stream) : code;
}

template <class Args, class Check, class Launch>
rssm_status call(const char* operation, const Args* args, void* stream, rssm_error* error, Check checkArgs,
                 Launch launch) {
  return checkedCall(operation, args, stream, error, checkArgs, [launch](const Args& a, cudaStream_t on) {
    for (int axis = 0; axis < a.x.rank; ++axis) {
      if (a.x.shape[axis] == 0) return cudaSuccess;
    }
    return launch(flatten(a), on);
  });
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_rms_norm(const rssm_rms_norm_args* args, void* stream, rssm_error* error) {
  return replayssm::call("rssm_rms_norm", args, stream, error, replayssm::checkNorm, replayssm::launchRmsNorm);
}

rssm_status rssm_activation(const rssm_activation_args* args, void* stream, rssm_error* error) {
  return replayssm::call("rssm_activation", args, stream, error, replayssm::checkActivation, replayssm::launchChosen);
}
