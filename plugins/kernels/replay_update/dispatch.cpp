// Args to traits: the only run-time switch of the update family.
#include "dispatch.h"

namespace replayssm {

// Defined by the generated instantiation files, one each.
#define RSSM_MAMBA2(act, p, n, teams, tokens) \
  cudaError_t mamba2_##act##_##p##_##n##_##teams##_##tokens(const UpdateParams&, cudaStream_t); \
  UpdateLaunch mamba2_##act##_##p##_##n##_##teams##_##tokens##_plan(const UpdateParams&);
#include "supported.inc"
#undef RSSM_MAMBA2

namespace {

struct Entry {
  ActivationType act;
  int headDim, stateDim, teams, maxTokens;
  UpdateLauncher launch;
  UpdateLaunch (*plan)(const UpdateParams&);
};

constexpr ActivationType kActivation_bf16 = ActivationType::kBfloat16;
constexpr ActivationType kActivation_fp16 = ActivationType::kFloat16;

#define RSSM_MAMBA2(act, p, n, teams, tokens) \
  {kActivation_##act, p, n, teams, tokens, mamba2_##act##_##p##_##n##_##teams##_##tokens, \
   mamba2_##act##_##p##_##n##_##teams##_##tokens##_plan},
const Entry kEntries[] = {
#include "supported.inc"
};
#undef RSSM_MAMBA2

}  // namespace

UpdateLauncher findMamba2Update(ActivationType act, const UpdateParams& p) {
  const Entry* best = nullptr;
  int bestStages = 0;
  for (const Entry& entry : kEntries) {
    if (entry.act != act || entry.headDim != p.headDim || entry.stateDim != p.stateDim) continue;
    if (entry.maxTokens < p.tokens) continue;
    int stages = entry.plan(p).stages;
    bool better = best == nullptr || entry.maxTokens < best->maxTokens ||
                  (entry.maxTokens == best->maxTokens && stages > bestStages);
    if (stages > 0 && better) {
      best = &entry;
      bestStages = stages;
    }
  }
  return best == nullptr ? nullptr : best->launch;
}

const char* supportedUpdates() {
#define RSSM_MAMBA2(act, p, n, teams, tokens) \
  "mamba2 float32 state, " #act ", d_v " #p ", d_k " #n ", T <= " #tokens "\n"
  return
#include "supported.inc"
      ;
#undef RSSM_MAMBA2
}

}  // namespace replayssm
