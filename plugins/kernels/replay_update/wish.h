// What a caller may ask of a launch of the update: plain data, as rssm_update_launch has it.
#pragma once

#include <cstdint>

namespace replayssm {

// As RSSM_UPDATE_PLAIN and the others.
enum class UpdateKernel : int32_t { kAny, kPlain, kDirect, kStreamed, kParts };

// Each 0: the library's choice.
struct LaunchWish {
  UpdateKernel kernel;
  int32_t multiprocessors;                   // streamed
  int32_t runHeads, pieceHeads, drawnRounds;  // streamed; pieceHeads of parts, too
  int32_t stages;                            // parts

  bool allows(UpdateKernel other) const { return kernel == UpdateKernel::kAny || kernel == other; }
  bool names(UpdateKernel other) const { return kernel == other; }
};

}  // namespace replayssm
