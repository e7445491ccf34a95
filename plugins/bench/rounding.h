// How far a right bfloat16 output and a float32 state may be from their float64 values. The rule and its reasons are in
// trtllm_replayssm/bench/rounding.py; a test compares the two.
#pragma once

#include <algorithm>
#include <cmath>

namespace rounding {

constexpr double kFactor = 2.0;
constexpr double kStepOperands = 0x1p-22;   // float32 in two TF32 parts
constexpr double kStateOperands = 0x1p-21;  // of the state and of what is added to it
constexpr double kFloat32Step = 0x1p-23;

// A floating-point type: bits of the significand, the leading one included; exponent of the smallest normal number.
struct FloatType {
  int bits, least;
};
constexpr FloatType kBfloat16{8, -126}, kFloat16{11, -14};

// Distance of neighbours in the binade of |value|; of zero the smallest.
inline double step(double value, FloatType type) {
  int exponent = type.least;
  if (value != 0) std::frexp(value, &exponent), exponent = std::max(exponent - 1, type.least);
  return std::ldexp(1.0, exponent - (type.bits - 1));
}

// share: what plain float32 loses of the formula, in units of `magnitude`, the sum of the magnitudes of its terms;
// rounded: what numbers rounded on the way may move the output by.
inline double outputBound(double exact, double magnitude, FloatType type, double share, double rounded) {
  const double noise = kFactor * std::max(share, kStepOperands) * magnitude + rounded;
  return 0.5 * step(std::abs(exact) + noise, type) + noise;
}

// Of a float32 state, over its head's largest value; share: what plain float32 loses of it.
inline double stateBound(double share) { return kFactor * std::max(share, kStateOperands) + kFloat32Step; }

}  // namespace rounding
