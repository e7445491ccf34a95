// Numbers of the gated delta rule that every kernel of it uses.
#pragma once

namespace replayssm {

constexpr float kNormEps = 1e-6f;         // under the root of a key's or query's L2 norm
constexpr float kLargestHalf = 65504.0f;  // corrections are clamped to float16's range before they are rounded to it

}  // namespace replayssm
