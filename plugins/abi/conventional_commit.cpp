// extern "C" face of the cursor commit of conventional states.
#include "abi/check.h"
#include "kernels/commit/commit.h"
#include "replayssm/conventional.h"

rssm_status rssm_conventional_commit(const rssm_conventional_commit_args* args, void* stream, rssm_error* error) {
  replayssm::Checker check("rssm_conventional_commit", error);
  if (args == nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, "args", "expected a pointer, got null");
    return check.status();
  }
  const rssm_conventional_commit_args& a = *args;
  check.header(a.struct_size, sizeof(rssm_conventional_commit_args), a.abi_version);
  check.range("entries", a.entries, 2, 17);
  if (!check.ok()) return check.status();
  check.tensor("slot", a.slot, RSSM_INT32, {replayssm::kAny});
  check.range("slot: B", a.slot.shape[0], 0, INT32_MAX / 2);
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {a.slot.shape[0]});
  check.tensor("accepted", a.accepted, RSSM_INT32, {a.slot.shape[0]});
  check.tensor("entry", a.entry, RSSM_INT32, {replayssm::kAny});
  check.tensor("position", a.position, RSSM_INT32, {a.entry.shape[0]});
  check.contiguous("entry", a.entry, 0);
  check.contiguous("position", a.position, 0);
  if (!check.ok() || a.slot.shape[0] == 0) return check.status();
  replayssm::EntryCommitParams p{};
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
  cudaError_t code = replayssm::launchEntryCommit(p, static_cast<cudaStream_t>(stream));
  if (code != cudaSuccess) check.fail(RSSM_CUDA_ERROR, "launch", "%s", cudaGetErrorString(code));
  return check.status();
}
