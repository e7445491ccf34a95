// What the instance files of all update kernels share: activation types as supported.inc spells them, and the pair of
// functions that dispatch.cpp calls.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dispatch.h"

namespace replayssm {

using bf16 = __nv_bfloat16;
using fp16 = __half;

}  // namespace replayssm

#define RSSM_LAUNCHED(name, launcher, chooser, traits)                                       \
  cudaError_t name(const UpdateParams& q, const UpdateLaunch& launch, cudaStream_t stream) { \
    return launcher<traits>(q, launch, stream);                                              \
  }                                                                                          \
  UpdateLaunch name##_plan(const UpdateParams& q, const LaunchWish& wish) { return chooser<traits>(q, wish); }
