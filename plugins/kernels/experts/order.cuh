// Tokens with their columns in the order that the operand of a warpgroup's instruction wants (columnPlace), so that 8 of them
// are 16 bytes which a product copies as they are.
#pragma once

#include "params.h"

namespace replayssm {

// By `threads` threads. Of each 64 columns two threads take half: a thread loads 8 columns of each 16; with the columns in
// order they are four pieces, two columns from each load in every one.
__device__ __forceinline__ void orderTokens(const OrderParams& p, int thread, int threads) {
  const int parts = p.columns / 32;
  for (int64_t unit = thread; unit < int64_t{p.tokens} * parts; unit += threads) {
    const int64_t token = unit / parts;
    const int part = static_cast<int>(unit - token * parts);
    const auto* in = static_cast<const uint16_t*>(p.in) + token * p.inStride + part / 2 * 64 + part % 2 * 8;
    uint4 from[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) from[k] = *reinterpret_cast<const uint4*>(in + 16 * k);
    auto* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + unit * 32);
    to[0] = {from[0].x, from[1].x, from[2].x, from[3].x};
    to[1] = {from[0].y, from[1].y, from[2].y, from[3].y};
    to[2] = {from[0].z, from[1].z, from[2].z, from[3].z};
    to[3] = {from[0].w, from[1].w, from[2].w, from[3].w};
  }
}

}  // namespace replayssm
