// extern "C" face of the update that skips faded heads: validate, flatten, dispatch.
#include "replayssm/decay_skip.h"

#include <cmath>

#include "abi/call.h"
#include "abi/update_problem.h"
#include "kernels/decay_skip/dispatch.h"

namespace replayssm {
namespace {

constexpr float kLargestThreshold = 0.25f;  // the bound holds below a half; a quarter keeps it within twice the threshold

struct Plan {
  UpdateParams params;
  SkippingLauncher launcher;  // null when the step is empty
};

Plan plan(const rssm_decay_skip_args* args, Checker& check) {
  Plan result{};
  if (!checkArguments(check, args)) return result;
  if (!(args->skip_below > 0.0f && args->skip_below <= kLargestThreshold)) {
    check.fail(RSSM_INVALID_ARGUMENT, "skip_below", "expected a number in (0, %g], got %g", kLargestThreshold,
               args->skip_below);
    return result;
  }
  const rssm_update_args& a = args->update;
  const rssm_update_launch& l = a.launch;
  if ((l.kernel | l.multiprocessors | l.run_heads | l.piece_heads | l.drawn_rounds | l.stages) != 0) {
    check.fail(RSSM_UNSUPPORTED, "update.launch", "expected zeros (the skipping update chooses its launch), got others");
    return result;
  }
  const UpdateProblem problem = updateProblem(&a, check);
  if (!check.ok()) return result;
  if (a.kind != RSSM_MAMBA2 || a.checkpoint.dtype != RSSM_FLOAT32 || a.read.data != nullptr) {
    check.fail(RSSM_UNSUPPORTED, "update", "expected Mamba-2 with one float32 checkpoint; built are:\n%s",
               supportedSkippingUpdates());
    return result;
  }
  result.params = problem.params;
  const UpdateParams& p = result.params;
  if (p.headsPerGroup > maxSkippingHeads()) {
    check.fail(RSSM_UNSUPPORTED, "update.k: G", "expected at most %d heads a group, got %d", maxSkippingHeads(),
               p.headsPerGroup);
    return result;
  }
  if (problem.empty) return result;
  result.launcher = findSkippingUpdate(problem.act, p);
  if (result.launcher == nullptr) {
    check.fail(RSSM_UNSUPPORTED, "update.value, update.k", "no kernel for %s, d_v %d, d_k %d, T %d; built are:\n%s",
               dtypeName(a.value.dtype), p.headDim, p.stateDim, p.tokens, supportedSkippingUpdates());
  }
  return result;
}

}  // namespace
}  // namespace replayssm

const char* rssm_decay_skip_supported(void) { return replayssm::supportedSkippingUpdates(); }

rssm_status rssm_decay_skip_update(const rssm_decay_skip_args* args, void* workspace, size_t workspace_bytes,
                                   void* stream, rssm_error* error) {
  replayssm::Checker check("rssm_decay_skip_update", error);
  replayssm::Plan plan = replayssm::plan(args, check);
  if (!check.ok() || plan.launcher == nullptr) return check.status();
  if (!replayssm::useTickets(check, plan.params, workspace, workspace_bytes)) return check.status();
  const float logThreshold = std::log(args->skip_below);
  replayssm::checkLaunch(check, plan.launcher(plan.params, logThreshold, static_cast<cudaStream_t>(stream)));
  return check.status();
}
