// extern "C" face of the dense product with packed weights: one expert, rows in order.
#include "abi/alignment.h"
#include "abi/call.h"
#include "abi/experts_checks.h"

namespace replayssm {
namespace {

void checkLinear(Checker& check, const rssm_packed_linear_args& a) {
  check.tensor("x", a.x, RSSM_BFLOAT16, {kAny, kAny});
  checkPassTokens(check, a.pass_tokens);
  if (!check.ok()) return;
  check.range("x: N", a.x.shape[0], 0, kMaxPairs);
  checkPacked(check, kLinearNames, a.weight, 1, 1);
  check.range("weight: columns", a.weight.columns, a.x.shape[1], a.x.shape[1]);
  check.tensor("out", a.out, RSSM_BFLOAT16, {a.x.shape[0], a.weight.rows});
  check.contiguous("x", a.x, 1);
  check.aligned("x", a.x);
  check.contiguous("out", a.out, 1);
  if (check.ok() && !isAligned(a.out, 4)) {
    check.fail(RSSM_INVALID_ARGUMENT, "out", "expected address and rows of whole 4 bytes, got %p and %lld elements",
               a.out.data, static_cast<long long>(a.out.stride[0]));
  }
}

cudaError_t launch(const rssm_packed_linear_args& a, cudaStream_t stream) {
  if (a.x.shape[0] == 0) return cudaSuccess;
  GroupedParams p = groupedParams(a.weight);
  p.epilogue = ExpertEpilogue::kPlain;
  p.in = a.x.data;
  p.inStride = a.x.stride[0];
  p.out = a.out.data;
  p.outStride = a.out.stride[0];
  p.tokens = static_cast<int32_t>(a.x.shape[0]);
  p.passTokens = choosePassTokens(a.pass_tokens, p.tokens, 1);
  p.weightsFirst = true;
  p.programmaticLaunch = (a.flags & RSSM_EXPERTS_PROGRAMMATIC_LAUNCH) != 0;
  return launchGrouped(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_packed_linear(const rssm_packed_linear_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_packed_linear", args, stream, error, replayssm::checkLinear, replayssm::launch);
}
