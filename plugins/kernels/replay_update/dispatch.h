// The update family as the ABI layer sees it: no templates, no CUDA syntax.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "wish.h"

namespace replayssm {

enum class UpdateFamily : int32_t { kMamba2, kGdn };
enum class ActivationType : int32_t { kBfloat16, kFloat16 };

// Formats of the checkpoint that flushes fold into and of the copy other steps read; equal: one copy serves both.
struct StateFormats {
  StateFormat recurrence, read;
};

// As supported.inc spells them.
constexpr StateFormat kFormat_fp32 = StateFormat::kFloat32;
constexpr StateFormat kFormat_fp16 = StateFormat::kFloat16;
constexpr StateFormat kFormat_fp8 = StateFormat::kE4m3;
constexpr StateFormat kFormat_nvfp4 = StateFormat::kE2m1;

// How a problem maps to a launch.
struct UpdateLaunch {
  int rank;  // between kernels built for as many tokens the highest is taken; 0: this one does not serve the problem
  UpdateKernel kernel;
  int grid, threads, sharedBytes;  // CTAs, threads and dynamic shared memory of each
  int stages;                      // items in flight or in use, all teams of a CTA; 0: no ring of stages
  int workers;                     // streamed: teams that get work
  int partHeads;                   // parts: heads of a CTA
  WorkDeal deal;                   // streamed
};

// A built kernel and how it is launched; launcher is null where none serves the problem.
using UpdateLauncher = cudaError_t (*)(const UpdateParams&, const UpdateLaunch&, cudaStream_t);
struct UpdateChoice {
  UpdateLauncher launcher;
  UpdateLaunch launch;
};

// Of the built kernels that serve the problem as wished, one for the fewest tokens. Pure.
UpdateChoice findUpdate(UpdateFamily family, StateFormats formats, ActivationType act, const UpdateParams& p,
                        const LaunchWish& wish);

// One line per built combination.
const char* supportedUpdates();

}  // namespace replayssm
