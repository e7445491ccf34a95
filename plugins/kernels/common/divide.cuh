// Correctly rounded reciprocals and quotients without branches or calls (Markstein).
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

// The same for any x from 2^-126 to 2^126.
RSSM_PORTABLE float inverse(float x) {
  // Scaling by a power of two keeps guess and remainder away from the ends of the range.
  constexpr float kLow = 8.67361738e-19f, kHigh = 1.15292150e18f;  // 2^-60, 2^60
  const float shift = x < kLow ? 7.37869763e19f : x > kHigh ? 1.35525272e-20f : 1.0f;  // 2^66, 2^-66
  return reciprocal(x * shift) * shift;
}

}  // namespace replayssm
