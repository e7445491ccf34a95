// How wide a kernel may access a view, by address and strides. Unlike Checker::aligned these never refuse: there is
// always a kernel for single elements.
#pragma once

#include <cstdint>

#include "abi/check.h"

namespace replayssm {

// Address and all strides but the last are multiples of `bytes`.
inline bool isAligned(const rssm_tensor& t, int bytes) {
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(bytes) != 0) return false;
  for (int axis = 0; axis + 1 < t.rank; ++axis) {
    if (t.shape[axis] > 1 && t.stride[axis] * dtypeBytes(t.dtype) % bytes != 0) return false;
  }
  return true;
}

inline bool areAligned(std::initializer_list<const rssm_tensor*> tensors, int bytes) {
  for (const rssm_tensor* t : tensors) {
    if (!isAligned(*t, bytes)) return false;
  }
  return true;
}

}  // namespace replayssm
