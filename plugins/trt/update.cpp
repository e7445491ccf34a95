#include <cuda_runtime_api.h>

#include "trt/update_config.h"

namespace replayssm::trt {

rssm_status runUpdate(int32_t kind, const UpdateConfig& config, rssm_update_args& args, void* workspace,
                      cudaStream_t stream, rssm_error* error) {
  args.kind = kind;
  args.window = config.window;
  args.layer = config.layer;
  args.head_offset = config.headOffset;
  int64_t tokens = args.value.shape[1];
  if (tokens > config.maxStepTokens) {
    *error = failure(RSSM_INVALID_ARGUMENT, "value: expected at most max_step_tokens = %d tokens a row, got %lld",
                     config.maxStepTokens, static_cast<long long>(tokens));
    return error->status;
  }
  size_t bytes = 0;
  rssm_status status = rssm_update_workspace(&args, &bytes, error);
  if (status != RSSM_OK) return status;
  if (bytes > 0) {
    cudaError_t code = cudaMemsetAsync(workspace, 0, bytes, stream);
    if (code != cudaSuccess) {
      *error = failure(RSSM_CUDA_ERROR, "workspace: %s", cudaGetErrorString(code));
      return error->status;
    }
  }
  return rssm_update(&args, workspace, bytes, stream, error);
}

}  // namespace replayssm::trt
