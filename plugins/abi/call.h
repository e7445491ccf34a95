// What every call of one struct of arguments does: a null pointer and a foreign struct are refused, the arguments checked,
// the work launched.
#pragma once

#include <cuda_runtime.h>

#include "abi/check.h"

namespace replayssm {

// checkArgs(check, args) refuses; run(args, stream) -> cudaError_t launches, only when all is well.
template <class Args, class Check, class Run>
rssm_status checkedCall(const char* operation, const Args* args, void* stream, rssm_error* error, Check checkArgs,
                        Run run) {
  Checker check(operation, error);
  if (args == nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, "args", "expected a pointer, got null");
    return check.status();
  }
  check.header(args->struct_size, sizeof(Args), args->abi_version);
  if (check.ok()) checkArgs(check, *args);
  if (!check.ok()) return check.status();
  const cudaError_t code = run(*args, static_cast<cudaStream_t>(stream));
  if (code != cudaSuccess) check.fail(RSSM_CUDA_ERROR, "launch", "%s", cudaGetErrorString(code));
  return check.status();
}

}  // namespace replayssm
