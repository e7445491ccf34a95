// Float32 -> float16 with stochastic rounding, saturating: states whose recurrence is kept in float16.
#pragma once

#include "grid.cuh"

namespace replayssm {

using HalfGrid = Grid<10, -14, 0x7bff>;

// Bits of x rounded up in magnitude with the probability of its fraction. NaN stays NaN.
RSSM_PORTABLE uint16_t halfStochastic(float x, uint32_t word) {
  const uint32_t bits = bitsOf(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t code;
  if (magnitude - 0x38800000u < 0x477fe000u - 0x38800000u) {
    // Between the smallest normal and the largest finite number: the fraction is the 13 bits that are cut off.
    code = (magnitude >> 13) - (112u << 10) + (word < magnitude << 19 ? 1u : 0u);
  } else if (magnitude > 0x7f800000u) {
    code = 0x7e00u;
  } else {
    code = stochasticCode<HalfGrid>(floatOf(magnitude), word);
  }
  return static_cast<uint16_t>(sign | code);
}

// Bits of x rounded to nearest, saturating (a read copy). NaN stays NaN.
RSSM_PORTABLE uint16_t halfNearest(float x) {
  const uint32_t bits = bitsOf(x), magnitude = bits & 0x7fffffffu;
  const uint32_t code = magnitude > 0x7f800000u ? 0x7e00u : nearestCode<HalfGrid>(floatOf(magnitude));
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | code);
}

}  // namespace replayssm
