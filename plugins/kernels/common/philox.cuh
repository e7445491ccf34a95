// Counter-based random words for stochastic rounding: Philox4x32-10 (Salmon et al., 2011), keyed as the package keys
// it: key = the request's 64-bit seed; counter = (element / 4, layer << 16 | global head, position, domain); element
// p * N + n takes word element % 4. No slot is in the key.
#pragma once

#include "portable.cuh"

namespace replayssm {

constexpr uint32_t kStateDomain = 1;  // last counter word of a checkpoint's draws

struct PhiloxWords {
  uint32_t word[4];
};

RSSM_PORTABLE PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What the draws of one head's checkpoint share.
struct StateRandom {
  uint64_t seed;
  uint32_t layerHead;  // layer << 16 | global head
  uint32_t position;   // tokens the checkpoint has absorbed

  // The words of elements 4 * quad .. 4 * quad + 3.
  RSSM_PORTABLE PhiloxWords words(uint32_t quad) const {
    return philox4x32(quad, layerHead, position, kStateDomain, seed);
  }
};

}  // namespace replayssm
