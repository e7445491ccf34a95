// Many exact quotients by one divisor: a correctly rounded reciprocal, then one correction step an element (Markstein).
#pragma once

#include "portable.cuh"

namespace replayssm {

// x / divisor, correctly rounded like the division itself. divisor: positive and normal, as scales are.
class Quotient {
 public:
  RSSM_PORTABLE explicit Quotient(float divisor)
      // Of the ends of the range, where the remainder or the reciprocal would be subnormal, only the division knows.
      : divisor_(divisor), inverse_(1.0f / divisor), plain_(divisor < kLow || divisor > kHigh) {}

  RSSM_PORTABLE float operator()(float x) const {
    const float guess = x * inverse_;
    const float rest = fmaf(-guess, divisor_, x);
    const float result = fmaf(rest, inverse_, guess);
    // Tiny and huge quotients (infinity and NaN among them) fall outside the proof.
    const float magnitude = fabsf(x);
    return plain_ || !(magnitude > kSmall && magnitude < kLarge) ? x / divisor_ : result;
  }

 private:
  static constexpr float kLow = 1e-20f, kHigh = 1e18f, kSmall = 1e-17f, kLarge = 1e18f;
  float divisor_, inverse_;
  bool plain_;
};

}  // namespace replayssm
