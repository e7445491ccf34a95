// Float32 -> float16 with stochastic rounding, saturating: states whose recurrence is kept in float16.
#pragma once

#include "grid.cuh"

namespace replayssm {

using HalfGrid = Grid<10, -14, 0x7bff>;

// Bits of x rounded up in magnitude with the probability of its fraction. NaN stays NaN. Without branches: of the
// significand, shifted right by what is cut off, the upper word is the code and the lower one the fraction.
RSSM_PORTABLE uint16_t halfStochastic(float x, uint32_t word) {
  constexpr int kSmallestExponent = 113, kLongestShift = 56;  // of a normal number, biased; leaves nothing
  const uint32_t bits = bitsOf(x), magnitude = bits & 0x7fffffffu;
  const int exponent = static_cast<int>(magnitude >> 23);
  const int missing = exponent < kSmallestExponent ? kSmallestExponent - exponent : 0;
  const int shift = missing + 13 < kLongestShift ? missing + 13 : kLongestShift;
  const uint64_t significand = static_cast<uint64_t>((magnitude & 0x7fffffu) | 0x800000u) << 32 >> shift;
  uint32_t code = (static_cast<uint32_t>(exponent + missing - kSmallestExponent) << 10) +
                  static_cast<uint32_t>(significand >> 32) + (word < static_cast<uint32_t>(significand) ? 1u : 0u);
  code = code < HalfGrid::kLargest ? code : HalfGrid::kLargest;
  code = magnitude > 0x7f800000u ? 0x7e00u : code;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | code);
}

// Bits of x rounded to nearest, saturating (a read copy). NaN stays NaN.
RSSM_PORTABLE uint16_t halfNearest(float x) {
  const uint32_t bits = bitsOf(x), magnitude = bits & 0x7fffffffu;
  const uint32_t code = magnitude > 0x7f800000u ? 0x7e00u : nearestCode<HalfGrid>(floatOf(magnitude));
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | code);
}

}  // namespace replayssm
