// What TensorRT looks up in a plugin library: getCreators and setLoggerFinder.
#include "trt/commit.h"
#include "trt/conv1d.h"
#include "trt/experts.h"
#include "trt/replay.h"
#include "trt/route.h"

namespace {

using namespace replayssm::trt;

nvinfer1::IPluginCreatorInterface* const* creators(int32_t& count) noexcept {
  static Creator<Mamba2Replay> mamba2;
  static Creator<GatedDeltaNetReplay> gatedDeltaNet;
  static Creator<CausalConv1dReplay> conv1d;
  static Creator<MoeRoute> route;
  static Creator<MoeExperts> experts;
  static Creator<ReplayCommit> commit;
  static nvinfer1::IPluginCreatorInterface* const all[] = {&mamba2, &gatedDeltaNet, &conv1d,
                                                              &route,  &experts,       &commit};
  count = static_cast<int32_t>(sizeof(all) / sizeof(all[0]));
  return all;
}

}  // namespace

extern "C" {

RSSM_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) { return creators(count); }

// Empty on purpose: the finder's vtable differs between TensorRT 10 and 11, and one library serves both.
RSSM_API void setLoggerFinder(void*) {}

}  // extern "C"
