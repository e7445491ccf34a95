// How a call maps to a grid, and the choice of the kernel.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {
namespace {

// Above this many threads a multiprocessor, each takes several rows: fewer filters to load, more loads in flight.
constexpr int64_t kBusyThreads = 1024;

int blocks(int64_t items, int size) { return static_cast<int>((items + size - 1) / size); }

template <class Act, int kTaps, int kVector, int kStep, int kRows, bool kPrompt>
cudaError_t launch(SsmInputsParams p, cudaStream_t stream) {
  p.channelBlocks = blocks(p.channels / kVector, kInputThreads);
  const int tile = p.tokens < kTokenTile ? p.tokens : kTokenTile;
  const int decayBlocks = p.decay == DecayKind::kNone ? 0 : blocks(int64_t{p.heads} * tile, kInputThreads);
  dim3 grid(static_cast<unsigned>(p.channelBlocks + decayBlocks), static_cast<unsigned>(blocks(p.tokens, kTokenTile)),
            static_cast<unsigned>(blocks(p.rows, kRows)));
  return launchOn(stream, p.programmaticLaunch, ssmInputsKernel<Act, kTaps, kVector, kStep, kRows, kPrompt>, grid,
                  kInputThreads, p);
}

// Steps of filters of up to 4 taps, the models' case.
template <class Act>
cudaError_t chooseRows(const SsmInputsParams& p, cudaStream_t stream) {
  const bool busy = int64_t{p.rows} * (p.channels / 4) > p.multiprocessors * kBusyThreads;
  if (p.tokens == 1) {
    return busy ? launch<Act, 4, 4, 1, 4, false>(p, stream) : launch<Act, 4, 4, 1, 1, false>(p, stream);
  }
  return busy ? launch<Act, 4, 4, 4, 2, false>(p, stream) : launch<Act, 4, 4, 4, 1, false>(p, stream);
}

template <class Act>
cudaError_t chooseShape(const SsmInputsParams& p, cudaStream_t stream) {
  if (p.vector == 1) {
    return p.prompt ? launch<Act, 8, 1, 4, 1, true>(p, stream) : launch<Act, 8, 1, 4, 1, false>(p, stream);
  }
  if (p.taps > 4) {
    return p.prompt ? launch<Act, 8, 4, 4, 1, true>(p, stream) : launch<Act, 8, 4, 4, 1, false>(p, stream);
  }
  return p.prompt ? launch<Act, 4, 4, 8, 1, true>(p, stream) : chooseRows<Act>(p, stream);
}

}  // namespace

cudaError_t launchSsmInputs(const SsmInputsParams& p, cudaStream_t stream) {
  return p.float16 ? chooseShape<__half>(p, stream) : chooseShape<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
