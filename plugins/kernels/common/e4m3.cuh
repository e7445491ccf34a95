// FP8 states: E4M3 elements, one float32 scale (amax / 448) per block of at most 128 elements along d_k.
#pragma once

#include "divide.cuh"
#include "grid.cuh"

namespace replayssm {

using E4m3Grid = Grid<3, -6, 0x7e>;
constexpr float kE4m3Largest = 448.0f;
constexpr float kSmallestScale = 1.17549435e-38f;  // 2^-126: no block that is not zero gets a subnormal scale

RSSM_PORTABLE uint8_t e4m3Signed(uint32_t bits, uint32_t code) {
  const uint32_t magnitude = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | magnitude);
}

// Code of x rounded to nearest even, saturating; NaN stays NaN. Plain arithmetic: the judge of the instruction.
RSSM_PORTABLE uint8_t e4m3NearestPlain(float x) {
  return e4m3Signed(bitsOf(x), nearestCode<E4m3Grid>(floatOf(bitsOf(x) & 0x7fffffffu)));
}

// Codes of two numbers, the first in the lower byte; sm_89 and later have an instruction.
RSSM_PORTABLE uint16_t e4m3NearestPair(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
  return pair;
#else
  return static_cast<uint16_t>(e4m3NearestPlain(x) | e4m3NearestPlain(y) << 8);
#endif
}

RSSM_PORTABLE uint8_t e4m3Nearest(float x) { return static_cast<uint8_t>(e4m3NearestPair(x, 0.0f)); }

RSSM_PORTABLE uint8_t e4m3Stochastic(float x, uint32_t word) {
  return e4m3Signed(bitsOf(x), stochasticCode<E4m3Grid>(floatOf(bitsOf(x) & 0x7fffffffu), word));
}

// Exact.
RSSM_PORTABLE float e4m3Value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return floatOf(0x7fc00000u);
  // As the top bits of a float32 the exponent is 120 too small; the multiplication also settles subnormal codes.
  const float value = floatOf(magnitude << 20) * 1.32922799578491587e36f;  // 2^120
  return (code & 0x80u) != 0 ? -value : value;
}

// Scale of a block whose largest finite magnitude is amax.
RSSM_PORTABLE float e4m3Scale(float amax) {
  const float scale = dividedBy(amax, kE4m3Largest, 1.0f / kE4m3Largest);
  return amax > 0.0f ? (scale > kSmallestScale ? scale : kSmallestScale) : 1.0f;
}

}  // namespace replayssm
