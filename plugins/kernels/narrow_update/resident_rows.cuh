// Where the rows of a launch of plain decoding stand, and which heads of them a CTA that stays reads: heads of all rows
// in order, as many for each CTA, the rows of which are looked up at once, one a lane.
#pragma once

#include "../replay_update/row_info.cuh"
#include "records.cuh"

namespace replayssm {

constexpr int kMostHeadRows = 30;  // rows' heads of a CTA, which looks up two rows more, one a lane

__device__ __forceinline__ bool flushes(const UpdateParams& p, const RowInfo& info) {
  return !info.idle() && info.pending + clampedTokens(p, info) > p.window;
}

// How many of this thread's rows flush.
template <int kThreads>
__device__ __forceinline__ int countFlushes(const UpdateParams& p, int thread) {
  int count = 0;
  for (int row = thread; row < p.rows; row += 2 * kThreads) {
    RowInfo info[2] = {fetchRow(p, row), fetchRow(p, row + kThreads < p.rows ? row + kThreads : -1)};
#pragma unroll
    for (RowInfo& each : info) fetchCursors(p, each);
    count += flushes(p, info[0]) + flushes(p, info[1]);
  }
  return count;
}

// A row and where it stands; -1: none.
struct PlacedRow {
  int id = -1;
  RowInfo info{-1, 0, 0, 0};
};

// The row behind `rank` others that flush, or (kFlushing false) that do not. Every lane may ask for another one.
template <bool kFlushing>
__device__ __forceinline__ PlacedRow rowOfRank(const UpdateParams& p, int lane, int rank) {
  PlacedRow found;
#pragma unroll 1
  for (int base = 0; base < p.rows && __any_sync(kAllLanes, rank >= 0); base += 128) {
    RowInfo info[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = base + 32 * i + lane;
      info[i] = fetchRow(p, row < p.rows ? row : -1);
    }
#pragma unroll
    for (RowInfo& each : info) fetchCursors(p, each);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = base + 32 * i;
      uint32_t mask = __ballot_sync(kAllLanes, first + lane < p.rows && flushes(p, info[i]) == kFlushing);
      const int count = __popc(mask);
      const bool here = rank >= 0 && rank < count;
#pragma unroll 1
      for (int before = here ? rank : 0; before > 0; --before) mask &= mask - 1;
      const int source = here ? __ffs(static_cast<int>(mask)) - 1 : 0;
      const RowInfo own = {__shfl_sync(kAllLanes, info[i].slot, source), __shfl_sync(kAllLanes, info[i].tokens, source),
                           __shfl_sync(kAllLanes, info[i].origin, source),
                           __shfl_sync(kAllLanes, info[i].pending, source)};
      if (here) found = {first + source, own};
      rank -= count;
    }
  }
  return found;
}

// The row that flushes behind `rank` others, of `flushing` in all; where all rows do there is nothing to search for.
__device__ __forceinline__ PlacedRow flushingRow(const UpdateParams& p, int lane, int rank, int flushing) {
  if (flushing < p.rows) return rowOfRank<true>(p, lane, rank);
  PlacedRow row{rank, fetchRow(p, rank)};
  fetchCursors(p, row.info);
  return row;
}

// A CTA's share of the heads of all rows that do not flush, counted in the order of those rows: begin..end-1. A CTA that
// flushes a part more than others reads less.
template <class Traits>
struct HeadRange {
  // Of a head, in heads that are read.
  static constexpr int kFlushCost = Traits::kRead == StateFormat::kE2m1 ? 12 : 6;

  const UpdateParams& p;
  int begin, end;
  int firstRow;           // of lane 0, among rows that do not flush
  int id;                 // of the lane's row among all
  RowInfo mine;           // of that row
  uint32_t reads, idles;  // lanes of rows that read, of those without a token

  __device__ HeadRange(const UpdateParams& params, int lane) : p(params) { lookUp(lane, 0, 0, 0); }

  // flushing: rows; `parts` of them, of partHeads heads, are dealt out to the CTAs in turn.
  __device__ void lookUp(int lane, int flushing, int parts, int partHeads) {
    const int total = (p.rows - flushing) * p.heads, rounds = (total + Traits::kWarps - 1) / Traits::kWarps;
    const int blocks = gridDim.x, block = blockIdx.x, worth = partHeads * kFlushCost / Traits::kWarps;
    int busy = parts % blocks;  // CTAs that flush one part more
    int least = max((rounds - (blocks - busy) * worth) / blocks, 0);
    if ((rounds - busy * least) / (blocks - busy) * Traits::kWarps > kMostHeadRows * p.heads) busy = 0;
    const int64_t rest = rounds - busy * least;
    const auto bound = [&](int number) {
      const int first = min(number, busy);
      return min((first * least + static_cast<int>((number - first) * rest / (blocks - busy))) * Traits::kWarps, total);
    };
    begin = bound(block);
    end = bound(block + 1);
    firstRow = begin / p.heads;
    const bool inside = (firstRow + lane) * p.heads < end;
    id = inside ? firstRow + lane : -1;
    if (flushing > 0) {
      const PlacedRow row = rowOfRank<false>(p, lane, id);
      id = row.id;
      mine = row.info;
    } else {
      mine = fetchRow(p, id);
      fetchCursors(p, mine);
    }
    idles = __ballot_sync(kAllLanes, inside && mine.idle());
    reads = __ballot_sync(kAllLanes, inside && !mine.idle() && !flushes(p, mine));
  }

  __device__ RowInfo info(int row) const {
    return {__shfl_sync(kAllLanes, mine.slot, row), 1, __shfl_sync(kAllLanes, mine.origin, row),
            __shfl_sync(kAllLanes, mine.pending, row)};
  }
  __device__ int idOf(int row) const { return __shfl_sync(kAllLanes, id, row); }
  __device__ int rowStart(int row) const { return (firstRow + row) * p.heads; }

  // The first of head, head + step, ... whose row reads, and that row's lane; `end` where there is none.
  struct Place {
    int head, row;
  };
  __device__ Place reading(int head, int step) const {
#pragma unroll 1
    while (head < end) {
      const int row = head / p.heads - firstRow;
      const uint32_t later = reads >> row;
      if ((later & 1) != 0) return {head, row};
      if (later == 0) break;
      const int ahead = rowStart(row + __ffs(static_cast<int>(later)) - 1) - head;
      head += (ahead + step - 1) / step * step;
    }
    return {end, 0};
  }
};

}  // namespace replayssm
