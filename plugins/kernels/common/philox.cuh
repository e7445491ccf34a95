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

// Told to the compiler, which otherwise adds zeros to some upper words.
RSSM_PORTABLE uint64_t wideProduct(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

// The words, or their complements, of kCount counters whose first words are c[i] and which share the others. Their
// rounds are side by side, so that they share the round keys and whatever of the first two rounds does not depend on
// c[i].
template <bool kComplements, int kCount>
RSSM_PORTABLE void philox4x32(PhiloxWords (&words)[kCount], const uint32_t (&c)[kCount], uint32_t c1, uint32_t c2,
                              uint32_t c3, uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < kCount; ++i) words[i] = {{c[i], c1, c2, c3}};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint32_t turn = kComplements && round == 9 ? ~0u : 0u;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < kCount; ++i) {
      uint32_t(&w)[4] = words[i].word;
      const uint64_t p0 = wideProduct(w[0], 0xD2511F53u), p1 = wideProduct(w[2], 0xCD9E8D57u);
      w[0] = static_cast<uint32_t>(p1 >> 32) ^ w[1] ^ (k0 ^ turn);
      w[1] = static_cast<uint32_t>(p1) ^ turn;
      w[2] = static_cast<uint32_t>(p0 >> 32) ^ w[3] ^ (k1 ^ turn);
      w[3] = static_cast<uint32_t>(p0) ^ turn;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

RSSM_PORTABLE PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  PhiloxWords words[1];
  philox4x32<false, 1>(words, {c0}, c1, c2, c3, seed);
  return words[0];
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
  // Their complements, for several of these.
  template <int kCount>
  RSSM_PORTABLE void complements(PhiloxWords (&words)[kCount], const uint32_t (&quads)[kCount]) const {
    philox4x32<true, kCount>(words, quads, layerHead, position, kStateDomain, seed);
  }
};

}  // namespace replayssm
