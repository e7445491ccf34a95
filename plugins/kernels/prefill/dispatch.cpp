// Args to traits: the only run-time switch of the prompt scan.
#include "dispatch.h"

namespace replayssm {

// Defined by the generated instantiation files, one each.
#define RSSM_PREFILL(family, act, n, warps, resident)                                                  \
  PrefillLaunch family##_##act##_##n##_##warps##_prefillPlan(const PrefillParams&);                    \
  cudaError_t family##_##act##_##n##_##warps##_prefill(const PrefillParams&, const PrefillLaunch&, cudaStream_t);
#include "supported.inc"
#undef RSSM_PREFILL

namespace {

constexpr PrefillFamily kPrefill_mamba2 = PrefillFamily::kMamba2;
constexpr PrefillFamily kPrefill_gdn = PrefillFamily::kGdn;
constexpr PrefillActivation kPrefill_bf16 = PrefillActivation::kBfloat16;
constexpr PrefillActivation kPrefill_fp16 = PrefillActivation::kFloat16;

#define RSSM_PREFILL(family, act, n, warps, resident)                                             \
  {kPrefill_##family, kPrefill_##act, n, 16 * warps, family##_##act##_##n##_##warps##_prefillPlan, \
   family##_##act##_##n##_##warps##_prefill},
const PrefillKernel kKernels[] = {
#include "supported.inc"
};
#undef RSSM_PREFILL

}  // namespace

const PrefillKernel* findPrefill(PrefillFamily family, PrefillActivation act, const PrefillParams& p) {
  const PrefillKernel* best = nullptr;
  for (const PrefillKernel& kernel : kKernels) {
    if (kernel.family != family || kernel.act != act || kernel.stateDim != p.stateDim) continue;
    if (p.headDim % 16 != 0 || kernel.maxHeadDim < p.headDim || kernel.plan(p).stages == 0) continue;
    if (best == nullptr || kernel.maxHeadDim < best->maxHeadDim) best = &kernel;
  }
  return best;
}

const char* supportedPrefills() {
#define RSSM_PREFILL(family, act, n, warps, resident) \
  #family ", " #act ", d_k " #n ", d_v a multiple of 16 up to 16 * " #warps "\n"
  return
#include "supported.inc"
      ;
#undef RSSM_PREFILL
}

}  // namespace replayssm
