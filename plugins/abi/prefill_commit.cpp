// extern "C" face of the cursor commit after a prompt chunk.
#include "abi/call.h"
#include "abi/cursor_checks.h"
#include "kernels/prefill/dispatch.h"
#include "replayssm/prefill.h"

namespace replayssm {
namespace {

void checkCommit(Checker& check, const rssm_prefill_commit_args& a) {
  check.range("max_tokens", a.max_tokens, 0, INT32_MAX);
  checkCursorMove(check, a.slot, a.num_tokens, a.origin, a.h, a.position);
}

cudaError_t launch(const rssm_prefill_commit_args& a, cudaStream_t stream) {
  if (a.slot.shape[0] == 0) return cudaSuccess;
  PrefillCommitParams p{};
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
  return launchPrefillCommit(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_prefill_commit(const rssm_prefill_commit_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_prefill_commit", args, stream, error, replayssm::checkCommit,
                                replayssm::launch);
}
