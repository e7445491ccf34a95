// Exact quotients without branches or calls: a correctly rounded reciprocal, then one correction step (Markstein).
#pragma once

#include "portable.cuh"

namespace replayssm {

// 1 / x, correctly rounded, for x from 2^-61 to 2^67. On the device as the compiler's own division starts.
RSSM_PORTABLE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return fmaf(guess, fmaf(-x, guess, 1.0f), guess);
#else
  return 1.0f / x;
#endif
}

// value / divisor for a constant divisor (its correctly rounded reciprocal beside it): correctly rounded where the
// quotient is normal. value: finite, not negative.
RSSM_PORTABLE float dividedBy(float value, float divisor, float inverse) {
  const bool small = value < 8.67361738e-19f;  // 2^-60; a power of two keeps the remainder from vanishing
  const float scaled = value * (small ? 7.37869763e19f : 1.0f);
  const float guess = scaled * inverse;
  return fmaf(fmaf(-guess, divisor, scaled), inverse, guess) * (small ? 1.35525272e-20f : 1.0f);
}

// What states are divided by before they are rounded: a scale, positive and normal.
class Quotient {
 public:
  RSSM_PORTABLE explicit Quotient(float divisor) {
    // Scaling both operands by a power of two keeps remainder and reciprocal away from the ends of the range.
    shift_ = divisor < kLow ? kUp : divisor > kHigh ? kDown : 1.0f;
    divisor_ = divisor * shift_;
    inverse_ = reciprocal(divisor_);
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
