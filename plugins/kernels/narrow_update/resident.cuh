// The body of the update of plain decoding of Mamba-2: CTAs that stay, as many as have room at a time. Rows that flush come
// first, a part (a run of heads of one row and group) after the other; then each CTA reads its share of all other heads.
#pragma once

#include "flush.cuh"
#include "flush_cut.h"
#include "resident_reads.cuh"
#include "sizes.cuh"

namespace replayssm {

constexpr int kPartNumber = 176;    // words of shared memory
constexpr int kFlushingRows = 180;
constexpr int kPartHeads = 184;

template <class Traits>
struct ResidentUpdate {
  const UpdateParams& p;
  const NarrowLayout& layout;
  char* const shared;
  const int warp, lane;

  __device__ uint32_t barriers() const { return sharedAddress(shared) + warp * kMaxNarrowStages * 8; }

  // The warp's barriers, anew: their next phase is the first.
  __device__ void initAgain() const {
    __syncwarp();
    if (lane == 0) {
#pragma unroll 1
      for (int s = 0; s < layout.stages; ++s) {
        barrierInvalidate(barriers() + 8 * s);
        barrierInit(barriers() + 8 * s, 32);
      }
      barrierInitFence();
    }
    __syncwarp();
  }

  // Part `number` of a row's, of `all` parts. Its first thread asks meanwhile which part is the CTA's next one.
  __device__ void flushPart(const PlacedRow& row, int number, int all) const {
    const int runs = partsOfRow() / p.groups, group = number / runs, first = (number - group * runs) * partHeads();
    const RowInfo& info = row.info;
    const Part<Traits> part{p, layout, shared, warp, lane, row.id, info.slot, 1, info.origin, info.pending, group,
                            group * p.headsPerGroup + first, min(partHeads(), p.headsPerGroup - first), 1, shared};
    const HeadFlush<Traits> flush{part, barriers()};
    part.loadKeys(threadIdx.x);
    part.loadHeads(threadIdx.x);
    if (threadIdx.x == 0) part.save();
    flush.start();
    const int ctas = static_cast<int>(gridDim.x);
    int next = all;
    if (threadIdx.x == 0 && all > ctas) next = ctas + static_cast<int>(atomicAdd(p.tickets, 1u));
    loadsWaitGroups();
    __syncthreads();
    if (threadIdx.x == 0) *word(kPartNumber) = next;  // everybody has read this one's
    part.multiplyKeys();
    part.appendKeys(threadIdx.x);
    flush.prepareVectors();
    part.appendHeads(threadIdx.x);
    __syncthreads();
    flush.makeWeights();
    __syncthreads();
    flush.run();
  }

  __device__ volatile int* word(int at) const { return reinterpret_cast<volatile int*>(shared + at); }
  __device__ int partHeads() const { return *word(kPartHeads); }
  __device__ int partsOfRow() const { return FlushCut{1, partHeads()}.partsOfRow(p.groups, p.headsPerGroup); }

  // Parts of a group are about as large as each other. Smaller ones pay where a flush takes ten times a read and more:
  // else other CTAs read meanwhile.
  __device__ void cutRows() const {
    constexpr bool kSmaller = Traits::kRead == StateFormat::kE2m1 && Traits::kRecurrence != StateFormat::kFloat32;
    const int runs = partsOf(p.headsPerGroup, layout.partHeads);
    FlushCut cut{1, partsOf(p.headsPerGroup, runs)};
    if (kSmaller) cut = cutFlushes(*word(kFlushingRows), p.groups, p.headsPerGroup, cut, static_cast<int>(gridDim.x));
    *word(kPartHeads) = cut.heads;
  }

  // Parts of rows that flush: the CTA's own number, then, as multiprocessors differ by a tenth, whatever it draws from a
  // counter. Nothing is kept in registers over one.
  __device__ void flushRows() const {
    __syncthreads();  // all flushing rows are counted
    if (threadIdx.x == 0) {
      *word(kPartNumber) = static_cast<int>(blockIdx.x);
      cutRows();
    }
#pragma unroll 1
    while (true) {
      __syncthreads();
      const int number = *word(kPartNumber), rows = *word(kFlushingRows), parts = rows * partsOfRow();
      if (number >= parts) break;
      const int rank = number / partsOfRow();
      flushPart(flushingRow(p, lane, rank, rows), number - rank * partsOfRow(), parts);
      asyncProxyFence();
      initAgain();
    }
    if (threadIdx.x == 0) leave();
  }

  // The last CTA to finish its flushes leaves the counters at zero for the next launch.
  __device__ void leave() const {
    if (*word(kFlushingRows) * partsOfRow() <= static_cast<int>(gridDim.x)) return;
    __threadfence();
    if (atomicAdd(p.tickets + 1, 1u) == gridDim.x - 1) {
      p.tickets[0] = 0;
      p.tickets[1] = 0;
    }
  }

  __device__ void run() const {
    if (lane == 0) {
#pragma unroll 1
      for (int s = 0; s < layout.stages; ++s) barrierInit(barriers() + 8 * s, 32);
      if (warp == 0) {
        *word(kFlushingRows) = 0;
        barrierInit(sharedAddress(shared) + kLandedBarrier, Traits::kThreads);
        barrierInit(sharedAddress(shared) + kReadyBarrier, Traits::kWarps * kWarpArrivals);
      }
      barrierInitFence();
    }
    HeadFlush<Traits>::init(layout, shared);
    if (!p.settled) waitForPredecessor();
    releaseDependents();
    HeadRange<Traits> range(p, lane);
    const int own = countFlushes<Traits::kThreads>(p, threadIdx.x);
    if (__syncthreads_or(own)) {
      if (p.settled) waitForPredecessor();
      if (own > 0) atomicAdd(reinterpret_cast<int*>(shared + kFlushingRows), own);
      flushRows();
      const int rows = *word(kFlushingRows);
      range.lookUp(lane, rows, rows * partsOfRow(), partHeads());  // anew: it is not kept in registers meanwhile
    }
    ResidentReads<Traits>{{p, layout, shared, warp, lane, range}}.run();
  }
};

}  // namespace replayssm
