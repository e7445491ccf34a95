// The skipping update as the ABI layer sees it: no templates, no CUDA syntax.
#pragma once

#include "../replay_update/dispatch.h"

namespace replayssm {

// The built kernel that serves a Mamba-2 problem with float32 states, or null. Pure.
using SkippingLauncher = cudaError_t (*)(const UpdateParams&, float logThreshold, cudaStream_t);
SkippingLauncher findSkippingUpdate(ActivationType act, const UpdateParams& p);

// Most heads of a group that a launch takes.
int maxSkippingHeads();

// One line per built combination.
const char* supportedSkippingUpdates();

}  // namespace replayssm
