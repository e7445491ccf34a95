// What every call does around its own checks and its launch: a null pointer and a foreign struct are refused, a workspace
// is measured, a CUDA error becomes the caller's record.
#pragma once

#include <cuda_runtime_api.h>

#include "abi/check.h"

namespace replayssm {

// Whether there are arguments, of this library's version.
template <class Args>
bool checkArguments(Checker& check, const Args* args) {
  if (args == nullptr) return check.fail(RSSM_INVALID_ARGUMENT, "args", "expected a pointer, got null");
  return check.header(args->struct_size, sizeof(Args), args->abi_version);
}

// Whether the work was enqueued.
inline bool checkLaunch(Checker& check, cudaError_t code) {
  return code == cudaSuccess || check.fail(RSSM_CUDA_ERROR, "launch", "%s", cudaGetErrorString(code));
}

// Of the current device.
inline cudaError_t findMultiprocessors(int32_t& count) {
  int device = 0;
  const cudaError_t code = cudaGetDevice(&device);
  return code != cudaSuccess ? code : cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

// The answer of a workspace query. size() -> bytes, asked for only when all is well.
template <class Size>
rssm_status answerBytes(Checker& check, size_t* bytes, Size size) {
  if (check.ok() && bytes == nullptr) check.fail(RSSM_INVALID_ARGUMENT, "bytes", "expected a pointer, got null");
  if (check.ok()) *bytes = static_cast<size_t>(size());
  return check.status();
}

// Of at least `needed` bytes at an address that is a multiple of `alignment`; any where none are needed.
inline bool checkWorkspace(Checker& check, const void* workspace, size_t bytes, size_t needed,
                           size_t alignment = kBulkAlignment) {
  if (!check.ok() || needed == 0) return check.ok();
  if (workspace == nullptr || bytes < needed) {
    return check.fail(RSSM_WORKSPACE_TOO_SMALL, "workspace", "expected %zu bytes, got %zu at %p", needed, bytes,
                      workspace);
  }
  if (reinterpret_cast<uintptr_t>(workspace) % alignment == 0) return true;
  return check.fail(RSSM_INVALID_ARGUMENT, "workspace", "expected a %zu-byte aligned address, got %p", alignment,
                    workspace);
}

// A call without a workspace. checkArgs(check, args) refuses; run(args, stream) -> cudaError_t launches, only when all is
// well.
template <class Args, class Check, class Run>
rssm_status checkedCall(const char* operation, const Args* args, void* stream, rssm_error* error, Check checkArgs,
                        Run run) {
  Checker check(operation, error);
  if (checkArguments(check, args)) checkArgs(check, *args);
  if (check.ok()) checkLaunch(check, run(*args, static_cast<cudaStream_t>(stream)));
  return check.status();
}

}  // namespace replayssm
