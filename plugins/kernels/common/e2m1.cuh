// NVFP4 states: E2M1 elements, two in a byte (even index in the low nibble), one E4M3 scale per 16 elements along d_k
// and one float32 scale per head, amax / (6 * 448).
#pragma once

#include "e4m3.cuh"

namespace replayssm {

using E2m1Grid = Grid<1, 0, 7>;
constexpr float kE2m1Largest = 6.0f;
constexpr int kE2m1Block = 16;
constexpr float kSmallestHeadScale = 6.01853108e-36f;  // 2^-117: times the smallest block scale it is still normal

// There is no NaN: it becomes the largest positive number.
RSSM_PORTABLE uint32_t e2m1Signed(uint32_t bits, uint32_t code) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? E2m1Grid::kLargest : (bits >> 28 & 8u) | code;
}

// Code (4 bits) of x rounded to nearest, ties to even, saturating.
RSSM_PORTABLE uint32_t e2m1Nearest(float x) {
  constexpr uint32_t kOne = 0x3f800000u;
  const float capped = fminf(floatOf(bitsOf(x) & 0x7fffffffu), kE2m1Largest);
  // Adding 1.5 * 2^23 spacings rounds to whole spacings: half of the binade's start, but none is below 0.5. The codes
  // of a binade go on two behind those of the last.
  const uint32_t exponent = bitsOf(capped) & 0x7f800000u;
  const uint32_t binade = exponent > kOne ? exponent : kOne;
  const uint32_t whole = bitsOf(fmaf(floatOf(binade), 6291456.0f, capped)) & 7u;
  return e2m1Signed(bitsOf(x), whole + ((binade - kOne) >> 22));
}

RSSM_PORTABLE uint32_t e2m1Stochastic(float x, uint32_t word) {
  return e2m1Signed(bitsOf(x), stochasticCode<E2m1Grid>(floatOf(bitsOf(x) & 0x7fffffffu), word));
}

// Exact.
RSSM_PORTABLE float e2m1Value(uint32_t code) {
  // As the top bits of a float32 the exponent is 126 too small; the multiplication also settles 0.5.
  const float value = floatOf((code & 7u) << 22) * 8.50705917302346159e37f;  // 2^126
  return (code & 8u) != 0 ? -value : value;
}

// The head's scale, from its largest finite magnitude.
RSSM_PORTABLE float nvfp4HeadScale(float amax) {
  constexpr float kDivisor = kE2m1Largest * kE4m3Largest;
  const float scale = dividedBy(amax, kDivisor, 1.0f / kDivisor);
  return amax > 0.0f ? (scale > kSmallestHeadScale ? scale : kSmallestHeadScale) : 1.0f;
}

// What a block's largest magnitude is multiplied by to give its scale.
RSSM_PORTABLE float nvfp4BlockFactor(float headScale) { return inverse(kE2m1Largest * headScale); }

// E4M3 code of the scale of a block of 16 whose largest finite magnitude is amax; never zero.
RSSM_PORTABLE uint8_t nvfp4BlockScale(float amax, float blockFactor) {
  const uint8_t code = e4m3Nearest(amax * blockFactor);
  return amax > 0.0f ? (code > 0 ? code : 1) : 0x38;  // zeros: 1
}

// What an element of the block is multiplied by when read, and by whose inverse before its rounding.
RSSM_PORTABLE float nvfp4Scale(uint8_t blockCode, float headScale) { return e4m3Value(blockCode) * headScale; }

}  // namespace replayssm
