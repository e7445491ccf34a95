// extern "C" face of the cursor commit of conventional states.
#include "abi/call.h"
#include "kernels/commit/commit.h"
#include "replayssm/conventional.h"

namespace replayssm {
namespace {

void checkCommit(Checker& check, const rssm_conventional_commit_args& a) {
  check.range("entries", a.entries, 2, 17);
  if (!check.ok()) return;
  check.tensor("slot", a.slot, RSSM_INT32, {kAny});
  check.range("slot: B", a.slot.shape[0], 0, INT32_MAX / 2);
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {a.slot.shape[0]});
  check.tensor("accepted", a.accepted, RSSM_INT32, {a.slot.shape[0]});
  check.tensor("entry", a.entry, RSSM_INT32, {kAny});
  check.tensor("position", a.position, RSSM_INT32, {a.entry.shape[0]});
  check.contiguous("entry", a.entry, 0);
  check.contiguous("position", a.position, 0);
}

cudaError_t launch(const rssm_conventional_commit_args& a, cudaStream_t stream) {
  if (a.slot.shape[0] == 0) return cudaSuccess;
  EntryCommitParams p{};
  p.rows = static_cast<int32_t>(a.slot.shape[0]);
  p.slots = static_cast<int32_t>(a.entry.shape[0]);
  p.entries = a.entries;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.accepted = static_cast<const int32_t*>(a.accepted.data);
  p.acceptedStride = a.accepted.stride[0];
  p.entry = static_cast<int32_t*>(a.entry.data);
  p.position = static_cast<int32_t*>(a.position.data);
  return launchEntryCommit(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_conventional_commit(const rssm_conventional_commit_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_conventional_commit", args, stream, error, replayssm::checkCommit,
                                replayssm::launch);
}
