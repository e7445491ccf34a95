// How a call maps to a grid, and the choice of the kernel.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {
namespace {

constexpr int64_t kThreadsPerMultiprocessor = 1024;

// Rows a thread takes in turn, with its filter in registers: one, until the rows fill the GPU twice.
int rowsPerThread(const SsmInputsParams& p) {
  if (p.prompt) return 1;
  int64_t threads = static_cast<int64_t>(p.rows) * (p.channels / p.vector);
  int64_t waves = threads / (p.multiprocessors * kThreadsPerMultiprocessor);
  return static_cast<int>(waves < 1 ? 1 : waves < 8 ? waves : 8);
}

int blocks(int items, int size) { return (items + size - 1) / size; }

template <class Act, int kTaps, int kVector, bool kPrompt>
cudaError_t launch(SsmInputsParams p, cudaStream_t stream) {
  p.rowsPerThread = rowsPerThread(p);
  p.channelBlocks = blocks(p.channels / kVector, kInputThreads);
  const int headBlocks = p.decay == DecayKind::kNone ? 0 : blocks(p.heads, kInputThreads);
  dim3 grid(static_cast<unsigned>(p.channelBlocks + headBlocks), static_cast<unsigned>(blocks(p.tokens, kTokenTile)),
            static_cast<unsigned>(blocks(p.rows, p.rowsPerThread)));
  return launchOn(stream, p.programmaticLaunch, ssmInputsKernel<Act, kTaps, kVector, kPrompt>, grid, kInputThreads, p);
}

template <class Act, int kTaps, int kVector>
cudaError_t chooseLength(const SsmInputsParams& p, cudaStream_t stream) {
  return p.prompt ? launch<Act, kTaps, kVector, true>(p, stream) : launch<Act, kTaps, kVector, false>(p, stream);
}

template <class Act>
cudaError_t chooseShape(const SsmInputsParams& p, cudaStream_t stream) {
  if (p.vector == 1) return chooseLength<Act, 8, 1>(p, stream);
  return p.taps <= 4 ? chooseLength<Act, 4, 4>(p, stream) : chooseLength<Act, 8, 4>(p, stream);
}

}  // namespace

cudaError_t launchSsmInputs(const SsmInputsParams& p, cudaStream_t stream) {
  return p.float16 ? chooseShape<__half>(p, stream) : chooseShape<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
