// extern "C" face of the cursor commit.
#include "replayssm/commit.h"

#include "abi/call.h"
#include "abi/cursor_checks.h"
#include "kernels/commit/commit.h"

namespace replayssm {
namespace {

void checkCommit(Checker& check, const rssm_commit_args& a) {
  check.range("window", a.window, 1, 64);
  check.range("ring_rows", a.ring_rows, a.window + 1, a.window + 16);
  if (!check.ok()) return;
  checkCursorMove(check, a.slot, a.num_tokens, a.origin, a.h, a.position);
  check.tensor("accepted", a.accepted, RSSM_INT32, {a.slot.shape[0]});
}

cudaError_t launch(const rssm_commit_args& a, cudaStream_t stream) {
  if (a.slot.shape[0] == 0) return cudaSuccess;
  CommitParams p{};
  p.rows = static_cast<int32_t>(a.slot.shape[0]);
  p.slots = static_cast<int32_t>(a.origin.shape[0]);
  p.window = a.window;
  p.ringRows = a.ring_rows;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.accepted = static_cast<const int32_t*>(a.accepted.data);
  p.acceptedStride = a.accepted.stride[0];
  p.origin = static_cast<int32_t*>(a.origin.data);
  p.pending = static_cast<int32_t*>(a.h.data);
  p.position = static_cast<int32_t*>(a.position.data);
  return launchCommit(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_commit(const rssm_commit_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_commit", args, stream, error, replayssm::checkCommit, replayssm::launch);
}
