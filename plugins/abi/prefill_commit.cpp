// extern "C" face of the cursor commit after a prompt chunk.
#include "abi/cursor_checks.h"
#include "kernels/prefill/dispatch.h"
#include "replayssm/prefill.h"

rssm_status rssm_prefill_commit(const rssm_prefill_commit_args* args, void* stream, rssm_error* error) {
  replayssm::Checker check("rssm_prefill_commit", error);
  if (args == nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, "args", "expected a pointer, got null");
    return check.status();
  }
  const rssm_prefill_commit_args& a = *args;
  check.header(a.struct_size, sizeof(rssm_prefill_commit_args), a.abi_version);
  check.range("max_tokens", a.max_tokens, 0, INT32_MAX);
  replayssm::checkCursorMove(check, a.slot, a.num_tokens, a.origin, a.h, a.position);
  if (!check.ok() || a.slot.shape[0] == 0) return check.status();
  replayssm::PrefillCommitParams p{};
  p.rows = static_cast<int32_t>(a.slot.shape[0]);
  p.slots = static_cast<int32_t>(a.origin.shape[0]);
  p.maxTokens = a.max_tokens;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.origin = static_cast<int32_t*>(a.origin.data);
  p.pending = static_cast<int32_t*>(a.h.data);
  p.position = static_cast<int32_t*>(a.position.data);
  cudaError_t code = replayssm::launchPrefillCommit(p, static_cast<cudaStream_t>(stream));
  if (code != cudaSuccess) check.fail(RSSM_CUDA_ERROR, "launch", "%s", cudaGetErrorString(code));
  return check.status();
}
