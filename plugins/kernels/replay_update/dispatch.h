// The update family as the ABI layer sees it: no templates, no CUDA syntax.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

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

// How a problem maps to a launch. stages = 0: the kernel's shared memory cannot hold it.
struct UpdateLaunch {
  bool direct;      // a CTA for each head instead of persistent ones
  int workers;      // teams that get work
  int pieceHeads;   // heads of a piece of work
  int grid;         // CTAs, at most one per multiprocessor
  int sharedBytes;
  int stages;       // items in flight or in use, all teams of a CTA
};

// The built kernel that serves the problem with the most items in flight, or null. Pure.
using UpdateLauncher = cudaError_t (*)(const UpdateParams&, cudaStream_t);
UpdateLauncher findUpdate(UpdateFamily family, StateFormats formats, ActivationType act, const UpdateParams& p);

// One line per built combination.
const char* supportedUpdates();

}  // namespace replayssm
