// Args to traits: the only run-time switch of the skipping update.
#include "dispatch.h"

#include "faded.cuh"

namespace replayssm {

// Defined by the generated instantiation files, one each.
#define RSSM_DECAY_SKIP(act, p, n, teams, tokens)                                                          \
  cudaError_t skipping_##act##_##p##_##n##_##teams##_##tokens(const UpdateParams&, float, cudaStream_t);   \
  UpdateLaunch skipping_##act##_##p##_##n##_##teams##_##tokens##_plan(const UpdateParams&);
#include "supported.inc"
#undef RSSM_DECAY_SKIP

namespace {

struct Entry {
  ActivationType act;
  int headDim, stateDim, maxTokens;
  SkippingLauncher launch;
  UpdateLaunch (*plan)(const UpdateParams&);
};

constexpr ActivationType kActivation_bf16 = ActivationType::kBfloat16;

#define RSSM_DECAY_SKIP(act, p, n, teams, tokens)                                                             \
  {kActivation_##act, p, n, tokens, skipping_##act##_##p##_##n##_##teams##_##tokens,                          \
   skipping_##act##_##p##_##n##_##teams##_##tokens##_plan},
const Entry kEntries[] = {
#include "supported.inc"
};
#undef RSSM_DECAY_SKIP

}  // namespace

SkippingLauncher findSkippingUpdate(ActivationType act, const UpdateParams& p) {
  const Entry* best = nullptr;
  for (const Entry& entry : kEntries) {
    const bool fits = entry.act == act && entry.headDim == p.headDim && entry.stateDim == p.stateDim &&
                      entry.maxTokens >= p.tokens && entry.plan(p).rank > 0;
    if (fits && (best == nullptr || entry.maxTokens < best->maxTokens)) best = &entry;
  }
  return best == nullptr ? nullptr : best->launch;
}

int maxSkippingHeads() { return kMaxSkippingHeads; }

const char* supportedSkippingUpdates() {
#define RSSM_DECAY_SKIP(act, p, n, teams, tokens) \
  "mamba2 float32 state, " #act ", d_v " #p ", d_k " #n ", T <= " #tokens "\n"
  return
#include "supported.inc"
      ;
#undef RSSM_DECAY_SKIP
}

}  // namespace replayssm
