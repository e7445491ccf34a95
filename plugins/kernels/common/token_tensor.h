// A dense tensor of the tokens of a step or a prompt, as the kernels of the recurrences take it.
#pragma once

#include <cstdint>

namespace replayssm {

// [B, T, heads or groups, elements], the last axis contiguous; strides in elements.
struct TokenTensor {
  const void* data;
  int64_t rowStride, tokenStride, headStride;
};

}  // namespace replayssm
