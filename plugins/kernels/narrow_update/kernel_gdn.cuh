// The update of the gated delta rule with narrow states for one token: CTAs that stay. Rows that do not flush are read by
// warps on their own (stream_gdn.cuh), parts that do are folded by all warps of the CTA together (flush.cuh).
#pragma once

#include "flush.cuh"
#include "flush_cut.h"
#include "resident_rows.cuh"
#include "stream_gdn.cuh"

namespace replayssm {

// Flushes: parts of the rows that flush, all of a CTA's warps together. Of these the CTA takes that of its own number, then, as
// multiprocessors differ by a tenth, whatever it draws from a counter. Nothing is kept in registers over one.
template <class Traits>
struct GdnFlushes {
  const UpdateParams& p;
  const NarrowLayout& layout;
  const GdnReads& reads;
  char* const shared;

  // Words of the CTA's.
  __device__ volatile int* number() const { return reinterpret_cast<volatile int*>(shared + reads.flushOffset); }
  __device__ int* rows() const { return reinterpret_cast<int*>(shared + reads.flushOffset) + 1; }
  __device__ volatile int* cutWord() const { return number() + 2; }
  __device__ FlushCut cut() const { return {*cutWord() >> 8, *cutWord() & 255}; }
  __device__ int partsOfRow() const { return cut().partsOfRow(p.groups, p.headsPerGroup); }
  __device__ int parts() const { return *static_cast<volatile int*>(rows()) * partsOfRow(); }

  // Number `place` of the row's parts.
  __device__ __forceinline__ void flush(const PlacedRow& row, int place) const {
    const int thread = static_cast<int>(threadOf()), warp = thread / 32, lane = thread % 32;
    const uint32_t full = sharedAddress(shared) + warp * kMaxNarrowStages * 8;
    if (lane == 0) {
      barrierInvalidate(full);
      barrierInit(full, 32);
      barrierInitFence();
    }
    __syncwarp();
    const FlushCut cut = this->cut();
    const int runs = cut.partsOfRow(p.groups, p.headsPerGroup) * cut.groups / p.groups, set = place / runs;
    const int group = set * cut.groups, run = (place - set * runs) * cut.heads;
    const int heads = min(cut.heads, cut.groups * p.headsPerGroup - run);
    const Part<Traits> own{p, layout, shared, warp, lane, row.id, row.info.slot, 1, row.info.origin, row.info.pending,
                           group, group * p.headsPerGroup + run, heads, cut.groups, shared};
    const HeadFlush<Traits> flush{own, full};
    loadGroups(own);
    own.loadHeads(thread);
    if (thread == 0) own.save();
    flush.start();
    const int ctas = static_cast<int>(gridDim.x);
    int next = ctas;
    if (thread == 0) next = parts() > ctas ? ctas + static_cast<int>(atomicAdd(p.tickets, 1u)) : parts();
    loadsWaitGroups();
    __syncthreads();
    if (thread == 0) *number() = next;  // everybody has read this one's
    prepareGroups(own);
    flush.prepareVectors();
    own.appendHeads(thread);
    __syncthreads();
    flush.makeWeights();
    __syncthreads();
    flush.run();
    asyncProxyFence();
  }

  // Some row flushes.
  __device__ __forceinline__ void run() const {
    waitForPredecessor();
    HeadFlush<Traits>::init(layout, shared);
    if (threadOf() == 0) {
      const FlushCut cut = cutFlushes(*rows(), p.groups, p.headsPerGroup, {layout.partGroups, layout.partHeads},
                                      static_cast<int>(gridDim.x));
      *number() = static_cast<int>(blockIdx.x);
      *cutWord() = cut.groups << 8 | cut.heads;
    }
#pragma unroll 1
    for (;;) {
      __syncthreads();
      const int drawn = *number();
      if (drawn >= parts()) break;
      const int rank = drawn / partsOfRow();
      flush(flushingRow(p, static_cast<int>(threadOf()) % 32, rank, *rows()), drawn - rank * partsOfRow());
    }
    if (threadOf() == 0) leave();
  }

  // The last CTA to finish leaves the counters at zero for the next launch.
  __device__ void leave() const {
    if (parts() <= static_cast<int>(gridDim.x)) return;
    __threadfence();
    if (atomicAdd(p.tickets + 1, 1u) == gridDim.x - 1) {
      p.tickets[0] = 0;
      p.tickets[1] = 0;
    }
  }
};

// What a warp knows of a part's row, a word a lane: slot, tokens, origin, pending. The last two wait for the first.
struct RowWords {
  enum Kind { kIdle, kRead, kFlush };
  struct Row {
    Kind kind;
    int slot, origin, pending;
  };
  int word = -1;

  __device__ void fetch(const UpdateParams& p, int row, int lane) {
    word = -1;
    if (row >= p.rows || lane > 1) return;
    word = __ldcg(lane == 0 ? p.slot + row * p.slotStride : p.numTokens + row * p.numTokensStride);
  }
  // Garbage ids and cursors must do no harm: engine builders time their candidates with uninitialised inputs.
  __device__ void fetchCursors(const UpdateParams& p, int lane) {
    const int slot = __shfl_sync(kAllLanes, word, 0);
    if (static_cast<uint32_t>(slot) >= static_cast<uint32_t>(p.slots) || lane / 2 != 1) return;
    word = __ldcg((lane == 2 ? p.origin : p.pending) + slot);
  }
  __device__ Row take(const UpdateParams& p) const {
    const int tokens = __shfl_sync(kAllLanes, word, 1);
    Row row{kIdle, __shfl_sync(kAllLanes, word, 0), __shfl_sync(kAllLanes, word, 2), __shfl_sync(kAllLanes, word, 3)};
    row.origin = min(max(row.origin, 0), p.ringRows - 1);
    row.pending = min(max(row.pending, 0), p.window);
    if (static_cast<uint32_t>(row.slot) < static_cast<uint32_t>(p.slots) && tokens > 0) {
      row.kind = row.pending < p.window ? kRead : kFlush;
    }
    return row;
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksWanted)
    narrowGdnKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ NarrowLayout layout,
                    const __grid_constant__ GdnReads reads) {
  extern __shared__ __align__(128) char shared[];
  static_assert(kMaxNarrowStages == 3, "of each warp: a flush's barrier, then those of two stages");
  if (threadIdx.x % 32 == 0) {
    const uint32_t barriers = sharedAddress(shared) + threadIdx.x / 32 * kMaxNarrowStages * 8;
    barrierInit(barriers, 32);
    barrierInit(barriers + 8, 1);
    barrierInit(barriers + 16, 1);
    barrierInitFence();
  }
  const GdnFlushes<Traits> flushes{p, layout, reads, shared};
  if (threadIdx.x == 0) *flushes.rows() = 0;
  __syncthreads();
  if (!p.settled) waitForPredecessor();
  releaseDependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  GdnReader<Traits> reader{p, reads, shared + kBarrierArea + warp * GdnArea<Traits>::kBytes,
                           sharedAddress(shared) + (warp * kMaxNarrowStages + 1) * 8, warp, lane};
  RowWords words;
  words.fetch(p, reads.first().row, lane);
  const int flushing = countFlushes<Traits::kThreads>(p, static_cast<int>(threadIdx.x));
  if (flushing > 0) atomicAdd(flushes.rows(), flushing);
  words.fetchCursors(p, lane);
  RowWords::Row row = words.take(p);
  bool start = true;
  reader.keep(reads.first());
#pragma unroll 1
  while (reader.part().row < p.rows) {
    const GdnReads::Part part = reader.part();
    words.fetch(p, reads.after(part).row, lane);
    GdnShare share(p, reads, part, warp);
    if (row.kind == RowWords::kRead) {
      share.take(row.slot, row.origin, row.pending);
      const auto early = [&] { words.fetchCursors(p, lane); };
      const auto late = [&] {
        const GdnReads::Part next = reads.after(reader.part());
        row = words.take(p);
        start = row.kind != RowWords::kRead;
        reader.keep(next);
        if (start) return;
        GdnShare after(p, reads, next, warp);
        after.take(row.slot, row.origin, row.pending);
        reader.aim(after);
        reader.prefetchKeys(after);
      };
      reader.run(share, start, early, late);
    } else {
      if (row.kind == RowWords::kIdle) {
        waitForPredecessor();
        reader.writeZeros(share);
      }
      __syncwarp();  // every lane knows the part
      reader.keep(reads.after(part));
      words.fetchCursors(p, lane);
      row = words.take(p);
      start = true;
    }
  }
  asyncProxyFence();
  __syncthreads();  // every warp is done with what it read
  if (*flushes.rows() > 0) flushes.run();
}

}  // namespace replayssm
