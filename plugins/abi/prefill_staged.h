// A prompt chunk over a pool that is not one float32 checkpoint: states leave the pool in float32 with their records
// applied (rssm_state_export), are scanned in the workspace, and return rounded (rssm_state_import). The workspace
// holds them before the scan's own records: [B, H, P, N] float32, then per row the slots to read and to write, the
// position and the seed.
#pragma once

#include "abi/check.h"
#include "kernels/prefill/dispatch.h"
#include "replayssm/prefill.h"

namespace replayssm {

struct StagedLayout {
  size_t state, seed, source, target, position, bytes;  // offsets; bytes is a multiple of 256
};

StagedLayout stagedLayout(const PrefillParams& p);

// Points p.staged into the workspace and enqueues what precedes the scan.
rssm_status stageStates(const rssm_prefill_args& a, PrefillParams& p, char* workspace, cudaStream_t stream,
                        rssm_error* error);

// Enqueues what follows it.
rssm_status unstageStates(const rssm_prefill_args& a, const PrefillParams& p, char* workspace, cudaStream_t stream,
                          rssm_error* error);

}  // namespace replayssm
