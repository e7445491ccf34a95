// Many exact quotients by one divisor: a correctly rounded reciprocal, then one correction step an element (Markstein).
#pragma once

#include "portable.cuh"

namespace replayssm {

// What states are divided by before they are rounded: a scale, positive and normal.
class Quotient {
 public:
  RSSM_PORTABLE explicit Quotient(float divisor) {
    // Scaling both operands by a power of two keeps remainder and reciprocal away from the ends of the range.
    shift_ = divisor < kLow ? kUp : divisor > kHigh ? kDown : 1.0f;
    divisor_ = divisor * shift_;
    inverse_ = 1.0f / divisor_;
  }

  // magnitude / divisor for magnitude >= 0: correctly rounded from 2^-42 to kBeyond; below it within two units in the
  // last place, which no state format tells from zero; some number of at least kBeyond above it; NaN for NaN.
  RSSM_PORTABLE float operator()(float magnitude) const {
    const float value = magnitude * shift_;
    const float guess = value * inverse_;
    const float result = fmaf(fmaf(-guess, divisor_, value), inverse_, guess);
    return guess < kBeyond ? result : guess;
  }

  static constexpr float kBeyond = 1e4f;

 private:
  static constexpr float kLow = 8.67361738e-19f, kHigh = 1.15292150e18f;  // 2^-60, 2^60
  static constexpr float kUp = 7.37869763e19f, kDown = 1.35525272e-20f;   // 2^66, 2^-66
  float shift_, divisor_, inverse_;
};

}  // namespace replayssm
