// extern "C" face of the dense product with packed weights: one expert, rows in order.
#include "abi/alignment.h"
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

}  // namespace
}  // namespace replayssm

rssm_status rssm_packed_linear(const rssm_packed_linear_args* args, void* stream, rssm_error* error) {
  replayssm::Checker check("rssm_packed_linear", error);
  if (args == nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, "args", "expected a pointer, got null");
    return check.status();
  }
  check.header(args->struct_size, sizeof(rssm_packed_linear_args), args->abi_version);
  if (check.ok()) replayssm::checkLinear(check, *args);
  if (!check.ok() || args->x.shape[0] == 0) return check.status();
  replayssm::GroupedParams p = replayssm::groupedParams(args->weight);
  p.epilogue = replayssm::ExpertEpilogue::kPlain;
  p.in = args->x.data;
  p.inStride = args->x.stride[0];
  p.out = args->out.data;
  p.outStride = args->out.stride[0];
  p.tokens = static_cast<int32_t>(args->x.shape[0]);
  p.passTokens = replayssm::choosePassTokens(args->pass_tokens, p.tokens, 1);
  p.weightsFirst = true;
  p.programmaticLaunch = (args->flags & RSSM_EXPERTS_PROGRAMMATIC_LAUNCH) != 0;
  const cudaError_t code = replayssm::launchGrouped(p, static_cast<cudaStream_t>(stream));
  if (code != cudaSuccess) check.fail(RSSM_CUDA_ERROR, "launch", "%s", cudaGetErrorString(code));
  return check.status();
}
