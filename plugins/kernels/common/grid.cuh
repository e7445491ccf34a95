// Rounding of float32 onto a small binary floating-point grid, to nearest (ties to even) or stochastically, saturating.
// Bit for bit the specification's round_to_grid; the storage formats (float16.cuh, e4m3.cuh, e2m1.cuh) instantiate it.
#pragma once

#include "portable.cuh"

namespace replayssm {

// kMantissa stored bits; kMinExponent of the smallest normal; kLargest, the code of the largest finite magnitude.
template <int kMantissa_, int kMinExponent_, uint32_t kLargest_>
struct Grid {
  static constexpr int kMantissa = kMantissa_;
  static constexpr int kMinExponent = kMinExponent_;
  static constexpr uint32_t kLargest = kLargest_;
};

// A magnitude in units of the grid's spacing around it: what rounding decides on. Exact.
struct GridPosition {
  uint32_t base;   // code of the binade's start, less the whole part of its first value
  float whole;     // spacings below the magnitude
  float fraction;  // of the next spacing, in [0, 1)
};

// magnitude >= 0, not NaN; what lies beyond the grid's last binade becomes the first value there.
template <class G>
RSSM_PORTABLE GridPosition gridPosition(float magnitude) {
  constexpr int kTop = static_cast<int>(G::kLargest >> G::kMantissa) + G::kMinExponent;  // beyond the largest binade
  const float cap = floatOf(static_cast<uint32_t>(127 + kTop) << 23);
  const float capped = magnitude < cap ? magnitude : cap;
  int exponent = static_cast<int>(bitsOf(capped) >> 23) - 127;
  exponent = exponent < G::kMinExponent ? G::kMinExponent : exponent;
  const float scaled = capped * floatOf(static_cast<uint32_t>(127 + G::kMantissa - exponent) << 23);
  const float whole = floorf(scaled);
  return {static_cast<uint32_t>(exponent - G::kMinExponent) << G::kMantissa, whole, scaled - whole};
}

template <class G>
RSSM_PORTABLE uint32_t gridCode(const GridPosition& at, bool up) {
  const uint32_t code = at.base + static_cast<uint32_t>(at.whole) + (up ? 1u : 0u);
  return code < G::kLargest ? code : G::kLargest;
}

// Code of the nearest magnitude, ties to the even code.
template <class G>
RSSM_PORTABLE uint32_t nearestCode(float magnitude) {
  const GridPosition at = gridPosition<G>(magnitude);
  const bool odd = at.whole * 0.5f != floorf(at.whole * 0.5f);
  return gridCode<G>(at, at.fraction > 0.5f || (at.fraction == 0.5f && odd));
}

// Up iff word < floor(fraction * 2^32). A magnitude beyond the largest is the largest.
template <class G>
RSSM_PORTABLE uint32_t stochasticCode(float magnitude, uint32_t word) {
  const GridPosition at = gridPosition<G>(magnitude);
  return gridCode<G>(at, word < static_cast<uint32_t>(at.fraction * 4294967296.0f));
}

}  // namespace replayssm
