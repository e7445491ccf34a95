// Registers of a step: a thread a row, a few tokens each.
#include "kernels/common/launch.cuh"
#include "params.h"

namespace replayssm {
namespace {

constexpr int kThreads = 64;

__device__ __forceinline__ int32_t entryOf(int32_t slot, int32_t slots) {
  return slot >= 0 && slot < slots ? slot : slots;
}

__global__ void __launch_bounds__(kThreads) stepInputsKernel(const __grid_constant__ StepInputsParams p) {
  const int32_t line = blockIdx.x * kThreads + threadIdx.x;
  if (line >= p.rows) return;
  const int32_t entry = entryOf(p.slot[line], p.slots);
  const bool alive = entry < p.slots && p.room[entry] > 0;
  const int64_t counted = p.draftCount[entry];
  const int64_t most = p.width - 1;
  const int64_t drafts = counted < 0 ? 0 : counted < most ? counted : most;
  p.numTokens[line] = alive ? 1 + static_cast<int32_t>(drafts) : 0;
  p.row[line] = entry;
  int64_t* ids = p.ids + static_cast<int64_t>(line) * p.width;
  ids[0] = p.last[entry];
  for (int32_t i = 1; i < p.width; ++i) ids[i] = p.draft[static_cast<int64_t>(entry) * p.drafts + i - 1];
}

// How many of the row's tokens stand before any end: the drafts that equal the token chosen before them, and one more.
__device__ __forceinline__ int64_t standing(const StepOutcomeParams& p, int32_t line, int32_t entry, int32_t run) {
  if (p.count != nullptr) return p.count[line];
  const int64_t* tokens = p.tokens + static_cast<int64_t>(line) * p.width;
  const int64_t* draft = p.draft + static_cast<int64_t>(entry) * p.drafts;
  int32_t count = 1;
  while (count < run && tokens[count - 1] == draft[count - 1]) ++count;
  return count;
}

__device__ __forceinline__ bool isStop(const StepOutcomeParams& p, int32_t entry, int64_t token) {
  const int64_t* stops = p.stopIds + static_cast<int64_t>(entry) * p.stops;
  bool found = false;
  for (int32_t i = 0; i < p.stops; ++i) found |= stops[i] == token;
  return found;
}

__global__ void __launch_bounds__(kThreads) stepOutcomeKernel(const __grid_constant__ StepOutcomeParams p) {
  const int32_t line = blockIdx.x * kThreads + threadIdx.x;
  if (line >= p.rows) return;
  const int32_t entry = entryOf(p.slot[line], p.slots);
  const int32_t asked = p.numTokens[line];
  const int32_t run = entry == p.slots || asked < 0 ? 0 : asked < p.width ? asked : p.width;
  const int64_t* tokens = p.tokens + static_cast<int64_t>(line) * p.width;
  bool broken = false;
  for (int32_t i = 0; i < run; ++i) broken |= p.finite[static_cast<int64_t>(line) * p.width + i] == 0;
  int32_t emitted = 0;
  if (run > 0) {
    const int64_t room = p.room[entry], length = p.length[entry];
    const int64_t count = standing(p, line, entry, run);
    const int64_t most = count < room ? count : room;
    bool ended = broken;
    while (!ended && emitted < most && emitted < run) ended = isStop(p, entry, tokens[emitted++]);
    ended |= room <= emitted;
    if (p.history != nullptr) {
      for (int32_t i = 0; i < emitted && length + i < p.positions; ++i) {
        p.history[static_cast<int64_t>(entry) * p.positions + length + i] = tokens[i];
      }
    }
    if (emitted > 0) p.last[entry] = tokens[emitted - 1];
    p.length[entry] = length + emitted;
    p.room[entry] = ended ? 0 : room - emitted;
  }
  p.emitted[line] = emitted;
  int64_t* report = p.report + static_cast<int64_t>(line) * (p.width + kReportExtra);
  for (int32_t i = 0; i < p.width; ++i) report[i] = tokens[i];
  report[p.width] = emitted;
  report[p.width + 1] = run;
  report[p.width + 2] = broken;
}

template <class Kernel, class Params>
cudaError_t launchRows(Kernel kernel, const Params& p, cudaStream_t stream) {
  return launchOn(stream, false, kernel, dim3(static_cast<unsigned>((p.rows + kThreads - 1) / kThreads)), kThreads, p);
}

}  // namespace

cudaError_t launchStepInputs(const StepInputsParams& p, cudaStream_t stream) {
  return launchRows(stepInputsKernel, p, stream);
}

cudaError_t launchStepOutcome(const StepOutcomeParams& p, cudaStream_t stream) {
  return launchRows(stepOutcomeKernel, p, stream);
}

}  // namespace replayssm
