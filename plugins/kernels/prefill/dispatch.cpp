// Args to traits: the only run-time switch of the prompt scan.
#include "dispatch.h"

namespace replayssm {

// Defined by the generated instantiation files, one each.
#define RSSM_PREFILL(family, act, n, warps, heads) \
  PrefillLaunch family##_##act##_##n##_##warps##_##heads##_prefillPlan(const PrefillParams&); \
  cudaError_t family##_##act##_##n##_##warps##_##heads##_prefill(const PrefillParams&, const PrefillLaunch&, cudaStream_t);
#include "supported.inc"
#undef RSSM_PREFILL

namespace {

constexpr int kMaxHeadDim = 128;

constexpr PrefillFamily kPrefill_mamba2 = PrefillFamily::kMamba2;
constexpr PrefillFamily kPrefill_gdn = PrefillFamily::kGdn;
constexpr PrefillActivation kPrefill_bf16 = PrefillActivation::kBfloat16;
constexpr PrefillActivation kPrefill_fp16 = PrefillActivation::kFloat16;

#define RSSM_PREFILL(family, act, n, warps, heads) \
  {kPrefill_##family, kPrefill_##act, n, family##_##act##_##n##_##warps##_##heads##_prefillPlan, \
   family##_##act##_##n##_##warps##_##heads##_prefill},
const PrefillKernel kKernels[] = {
#include "supported.inc"
};
#undef RSSM_PREFILL

}  // namespace

const PrefillKernel* findPrefill(PrefillFamily family, PrefillActivation act, const PrefillParams& p) {
  if (p.headDim % 16 != 0 || p.headDim > kMaxHeadDim) return nullptr;
  for (const PrefillKernel& kernel : kKernels) {
    if (kernel.family != family || kernel.act != act || kernel.stateDim != p.stateDim) continue;
    if (kernel.plan(p).stages > 0) return &kernel;
  }
  return nullptr;
}

const char* supportedPrefills() {
#define RSSM_PREFILL(family, act, n, warps, heads) \
  #family ", " #act ", d_k " #n ", d_v a multiple of 16 up to 128 (" #warps " warps, " #heads " heads a CTA)\n"
  return
#include "supported.inc"
      ;
#undef RSSM_PREFILL
}

}  // namespace replayssm
