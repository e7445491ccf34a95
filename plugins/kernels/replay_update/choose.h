// How a step over float32 states maps to a launch, a CTA a head or persistent ones: a pure function.
#pragma once

#include "deal.h"
#include "dispatch.h"

namespace replayssm {

// Up to this much state a multiprocessor, starting a CTA for each head is quicker than filling a pipeline.
constexpr int64_t kDirectBytes = 160 << 10;
constexpr int kMaxGridRows = 65535;

// What the choice needs to know of the two kernels of a recurrence.
struct KernelSizes {
  int64_t headBytes;  // state of a head
  int parts;          // CTAs of a head, direct
  int directThreads, directBytes;
  int teams, stages;  // of a CTA, streamed; stages of a team
  int streamedThreads, streamedBytes;
  int pieceHeads, runHeads, manyPieceHeads, fewRunHeads;  // streamed: see dealWork
};

inline UpdateLaunch chooseStreamed(const UpdateParams& p, const KernelSizes& sizes, const LaunchWish& wish) {
  UpdateLaunch launch{};
  const int64_t items = static_cast<int64_t>(p.rows) * p.heads;
  const int ctas = wish.multiprocessors > 0 ? wish.multiprocessors : p.multiprocessors;
  const int64_t teams = static_cast<int64_t>(ctas) * sizes.teams;
  launch.kernel = UpdateKernel::kStreamed;
  launch.stages = sizes.stages * sizes.teams;
  launch.workers = static_cast<int>(items < teams ? items : teams);
  launch.grid = static_cast<int>(items < ctas ? items : ctas);
  launch.threads = sizes.streamedThreads;
  launch.sharedBytes = sizes.streamedBytes;
  launch.deal = dealWork(p, launch.workers, sizes.pieceHeads, wish, sizes.runHeads, sizes.manyPieceHeads,
                         sizes.fewRunHeads);
  const bool serves = ctas <= p.multiprocessors && dealable(p, launch.workers, launch.deal, wish);
  launch.rank = serves ? launch.stages : 0;
  return launch;
}

inline UpdateLaunch chooseFloat32(const UpdateParams& p, const KernelSizes& sizes, const LaunchWish& wish) {
  const int64_t items = static_cast<int64_t>(p.rows) * p.heads;
  const bool small = items * sizes.headBytes <= p.multiprocessors * kDirectBytes;
  const bool direct = wish.allows(UpdateKernel::kDirect) && p.rows <= kMaxGridRows &&
                      (small || wish.names(UpdateKernel::kDirect));
  if (!direct) return wish.allows(UpdateKernel::kStreamed) ? chooseStreamed(p, sizes, wish) : UpdateLaunch{};
  UpdateLaunch launch{};
  launch.kernel = UpdateKernel::kDirect;
  launch.stages = sizes.stages * sizes.teams;
  launch.rank = launch.stages;
  launch.grid = static_cast<int>(items * sizes.parts);
  launch.threads = sizes.directThreads;
  launch.sharedBytes = sizes.directBytes;
  return launch;
}

}  // namespace replayssm
