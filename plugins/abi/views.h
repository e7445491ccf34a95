// What a view is, beyond its checks: absent, of which activation type, and as the kernels take it.
#pragma once

#include "kernels/common/token_tensor.h"
#include "replayssm/tensor.h"

namespace replayssm {

inline bool isAbsent(const rssm_tensor& t) { return t.data == nullptr && t.rank == 0; }

// The activation type a call runs in, told by one of its tensors; that this has it, a check must see to.
inline int32_t activationType(const rssm_tensor& t) { return t.dtype == RSSM_FLOAT16 ? RSSM_FLOAT16 : RSSM_BFLOAT16; }

// Of rank 3 or 4; strides of axes that are not there mean nothing.
inline TokenTensor tokenTensor(const rssm_tensor& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }

}  // namespace replayssm
