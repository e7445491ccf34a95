// extern "C" face of the prompt scan: validate, flatten to PrefillParams, dispatch.
#include "replayssm/prefill.h"

#include "abi/call.h"
#include "abi/prefill_checks.h"
#include "abi/prefill_staged.h"
#include "abi/views.h"
#include "kernels/prefill/dispatch.h"

namespace replayssm {
namespace {

constexpr int kMaxWindow = 64;

PrefillParams flatten(const rssm_prefill_args& a, const PrefillSizes& s) {
  PrefillParams p{};
  p.rows = static_cast<int32_t>(s.rows);
  p.tokens = static_cast<int32_t>(s.tokens);
  p.slots = static_cast<int32_t>(s.slots);
  p.heads = static_cast<int32_t>(s.heads);
  p.headDim = static_cast<int32_t>(s.headDim);
  p.groups = static_cast<int32_t>(s.groups);
  p.stateDim = static_cast<int32_t>(s.stateDim);
  p.headsPerGroup = p.heads / p.groups;
  p.window = a.window;
  p.ringRows = static_cast<int32_t>(s.ringRows);
  p.layer = a.layer;
  p.headOffset = a.head_offset;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.rowFlags = static_cast<const int32_t*>(a.row_flags.data);
  p.rowFlagsStride = a.row_flags.stride[0];
  p.carryIndex = static_cast<const int32_t*>(a.carry_index.data);
  p.carryIndexStride = a.carry_index.stride[0];
  p.origin = static_cast<const int32_t*>(a.origin.data);
  p.pending = static_cast<const int32_t*>(a.h.data);
  p.position = static_cast<const int32_t*>(a.position.data);
  p.seed = static_cast<const int64_t*>(a.seed.data);
  p.value = tokenTensor(a.value);
  p.k = tokenTensor(a.k);
  p.q = tokenTensor(a.q);
  p.dt = tokenTensor(s.gdn ? a.log_decay : a.dt);
  p.beta = tokenTensor(a.beta);
  p.a = static_cast<const float*>(a.a.data);
  p.skip = static_cast<const float*>(a.skip.data);
  p.out = a.out.data;
  p.outRowStride = a.out.stride[0];
  p.outTokenStride = a.out.stride[1];
  p.outHeadStride = a.out.stride[2];
  p.checkpoint = static_cast<float*>(a.checkpoint.data);
  p.checkpointSlotStride = a.checkpoint.stride[0];
  p.carry = static_cast<float*>(a.carry.data);
  p.carryStride = a.carry.stride[0];
  p.carries = a.carry.data == nullptr ? 0 : static_cast<int32_t>(a.carry.shape[0]);
  p.ringValue = a.ring_value.data;
  p.ringValueSlotStride = a.ring_value.stride[0];
  p.ringKey = a.ring_k.data;
  p.ringKeySlotStride = a.ring_k.stride[0];
  p.ringDt = static_cast<const float*>(a.ring_dt.data);
  p.ringDtSlotStride = a.ring_dt.stride[0];
  p.ringKeyFactor = static_cast<const float*>(a.ring_key_factor.data);
  p.ringKeyFactorSlotStride = a.ring_key_factor.stride[0];
  return p;
}

struct Plan {
  PrefillParams params;
  const PrefillKernel* kernel;  // null when there is nothing to do
  PrefillLaunch launch;
  size_t stagedBytes, workspaceBytes;  // the states at the workspace's beginning, and all of it
};

// Everything both public functions need to know; on failure check.ok() is false.
Plan plan(const rssm_prefill_args* args, Checker& check) {
  Plan result{};
  if (!checkArguments(check, args)) return result;
  const rssm_prefill_args& a = *args;
  check.range("window", a.window, 1, kMaxWindow);
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  check.range("flags", a.flags, 0, 0);
  if (!check.ok()) return result;
  const PrefillSizes s = prefillSizes(a);
  checkPrefillInputs(check, a, s);
  if (check.ok()) checkPrefillSizes(check, s);
  if (check.ok()) checkPrefillState(check, a, s);
  if (check.ok()) checkPrefillRing(check, a, s);
  checkPrefillRows(check, a, s);
  if (!check.ok()) return result;
  result.params = flatten(a, s);
  PrefillParams& p = result.params;
  if (p.rows == 0 || p.tokens == 0) return result;
  if (!checkLaunch(check, findMultiprocessors(p.multiprocessors))) return result;
  const PrefillActivation act = s.act == RSSM_FLOAT16 ? PrefillActivation::kFloat16 : PrefillActivation::kBfloat16;
  result.kernel = findPrefill(s.gdn ? PrefillFamily::kGdn : PrefillFamily::kMamba2, act, p);
  if (result.kernel == nullptr) {
    check.fail(RSSM_UNSUPPORTED, "value, k", "no kernel for %s, d_v %d, d_k %d; built are:\n%s", dtypeName(s.act),
               p.headDim, p.stateDim, supportedPrefills());
    return result;
  }
  result.launch = result.kernel->plan(p);
  p.splits = result.launch.splits;
  p.stages = result.launch.stages;
  result.stagedBytes = s.staged ? stagedLayout(p).bytes : 0;
  result.workspaceBytes = result.stagedBytes + result.launch.recordBytes;
  return result;
}

}  // namespace
}  // namespace replayssm

const char* rssm_prefill_supported(void) { return replayssm::supportedPrefills(); }

rssm_status rssm_prefill_workspace(const rssm_prefill_args* args, size_t* bytes, rssm_error* error) {
  replayssm::Checker check("rssm_prefill_workspace", error);
  const replayssm::Plan plan = replayssm::plan(args, check);
  return replayssm::answerBytes(check, bytes, [&] { return plan.workspaceBytes; });
}

rssm_status rssm_prefill(const rssm_prefill_args* args, void* workspace, size_t workspace_bytes, void* stream,
                         rssm_error* error) {
  replayssm::Checker check("rssm_prefill", error);
  replayssm::Plan plan = replayssm::plan(args, check);
  if (!check.ok() || plan.kernel == nullptr) return check.status();
  if (!replayssm::checkWorkspace(check, workspace, workspace_bytes, plan.workspaceBytes)) {
    return check.status();
  }
  char* const space = static_cast<char*>(workspace);
  cudaStream_t const on = static_cast<cudaStream_t>(stream);
  plan.params.records = space + plan.stagedBytes;
  if (plan.stagedBytes != 0) {
    const rssm_status status = replayssm::stageStates(*args, plan.params, space, on, error);
    if (status != RSSM_OK) return status;
  }
  replayssm::checkLaunch(check, plan.kernel->launch(plan.params, plan.launch, on));
  if (!check.ok() || plan.stagedBytes == 0) return check.status();
  return replayssm::unstageStates(*args, plan.params, space, on, error);
}
