// Args to traits: the only run-time switch of the update family.
#include "dispatch.h"

namespace replayssm {

// Defined by the generated instantiation files, one each.
#define RSSM_LAUNCHED(name)                                                  \
  cudaError_t name(const UpdateParams&, const UpdateLaunch&, cudaStream_t);  \
  UpdateLaunch name##_plan(const UpdateParams&, const LaunchWish&);
#define RSSM_UPDATE(family, act, p, n, teams, tokens) RSSM_LAUNCHED(family##_##act##_##p##_##n##_##teams##_##tokens)
#define RSSM_NARROW_UPDATE(family, recurrence, read, act, p, n, warps, tokens) \
  RSSM_LAUNCHED(family##_##recurrence##_##read##_##act##_##p##_##n##_##warps##_##tokens)
#define RSSM_WEIGHED_UPDATE(family, act, p, n, teams, tokens) RSSM_UPDATE(weighed_##family, act, p, n, teams, tokens)
#define RSSM_PLAIN_UPDATE(family, act, p, n, warps, rows, folds) RSSM_UPDATE(plain_##family, act, p, n, rows, folds)
#include "../plain_update/supported.inc"
#include "supported.inc"
#undef RSSM_PLAIN_UPDATE
#undef RSSM_UPDATE
#undef RSSM_NARROW_UPDATE
#undef RSSM_WEIGHED_UPDATE
#undef RSSM_LAUNCHED

namespace {

struct Entry {
  UpdateFamily family;
  StateFormats formats;
  ActivationType act;
  int headDim, stateDim, maxTokens;
  UpdateLauncher launch;
  UpdateLaunch (*plan)(const UpdateParams&, const LaunchWish&);
};

constexpr ActivationType kActivation_bf16 = ActivationType::kBfloat16;
constexpr ActivationType kActivation_fp16 = ActivationType::kFloat16;

constexpr UpdateFamily kFamily_mamba2 = UpdateFamily::kMamba2;
constexpr UpdateFamily kFamily_gdn = UpdateFamily::kGdn;

constexpr StateFormats kFloat32States{StateFormat::kFloat32, StateFormat::kFloat32};

#define RSSM_UPDATE(family, act, p, n, teams, tokens)                          \
  {kFamily_##family, kFloat32States, kActivation_##act, p, n, tokens,          \
   family##_##act##_##p##_##n##_##teams##_##tokens,                            \
   family##_##act##_##p##_##n##_##teams##_##tokens##_plan},
#define RSSM_NARROW_UPDATE(family, recurrence, read, act, p, n, warps, tokens)                            \
  {kFamily_##family, {kFormat_##recurrence, kFormat_##read}, kActivation_##act, p, n, tokens,             \
   family##_##recurrence##_##read##_##act##_##p##_##n##_##warps##_##tokens,                               \
   family##_##recurrence##_##read##_##act##_##p##_##n##_##warps##_##tokens##_plan},
#define RSSM_WEIGHED_UPDATE(family, act, p, n, teams, tokens)                             \
  {kFamily_##family, kFloat32States, kActivation_##act, p, n, tokens,                     \
   weighed_##family##_##act##_##p##_##n##_##teams##_##tokens,                             \
   weighed_##family##_##act##_##p##_##n##_##teams##_##tokens##_plan},
#define RSSM_PLAIN_UPDATE(family, act, p, n, warps, rows, folds)       \
  {kFamily_##family, kFloat32States, kActivation_##act, p, n, 1,       \
   plain_##family##_##act##_##p##_##n##_##rows##_##folds,              \
   plain_##family##_##act##_##p##_##n##_##rows##_##folds##_plan},
const Entry kEntries[] = {
#include "../plain_update/supported.inc"
#include "supported.inc"
};
#undef RSSM_PLAIN_UPDATE
#undef RSSM_UPDATE
#undef RSSM_NARROW_UPDATE
#undef RSSM_WEIGHED_UPDATE

}  // namespace

UpdateChoice findUpdate(UpdateFamily family, StateFormats formats, ActivationType act, const UpdateParams& p,
                        const LaunchWish& wish) {
  const Entry* best = nullptr;
  UpdateLaunch bestLaunch{};
  for (const Entry& entry : kEntries) {
    if (entry.family != family || entry.act != act) continue;
    if (entry.formats.recurrence != formats.recurrence || entry.formats.read != formats.read) continue;
    if (entry.headDim != p.headDim || entry.stateDim != p.stateDim) continue;
    if (entry.maxTokens < p.tokens) continue;
    const UpdateLaunch launch = entry.plan(p, wish);
    const bool better = best == nullptr || entry.maxTokens < best->maxTokens ||
                        (entry.maxTokens == best->maxTokens && launch.rank > bestLaunch.rank);
    if (launch.rank > 0 && better) {
      best = &entry;
      bestLaunch = launch;
    }
  }
  return {best == nullptr ? nullptr : best->launch, bestLaunch};
}

const char* supportedUpdates() {
#define RSSM_UPDATE(family, act, p, n, teams, tokens) \
  #family " float32 state, " #act ", d_v " #p ", d_k " #n ", T <= " #tokens "\n"
#define RSSM_NARROW_UPDATE(family, recurrence, read, act, p, n, warps, tokens) \
  #family " " #recurrence " state read as " #read ", " #act ", d_v " #p ", d_k " #n ", T <= " #tokens "\n"
#define RSSM_WEIGHED_UPDATE RSSM_UPDATE
  return
#include "supported.inc"
      ;
#undef RSSM_UPDATE
#undef RSSM_NARROW_UPDATE
#undef RSSM_WEIGHED_UPDATE
}

}  // namespace replayssm
