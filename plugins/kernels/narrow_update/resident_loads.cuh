// What CTAs that stay load while plain decoding of Mamba-2 does not flush: a warp's heads ahead of its work by as many
// items as it has stages, and for the heads of a row and group (a span) their keys, query and step sizes.
#pragma once

#include "resident_rows.cuh"
#include "stream.cuh"

namespace replayssm {

constexpr int kLandedBarrier = 160;  // of all threads' loads of a span's keys
constexpr int kReadyBarrier = 168;     // of all warps' work on them

// A number of the step's or the state's, read here and now.
__device__ __forceinline__ float numberNow(const float* at) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}

template <class Traits>
struct ResidentLoads {
  using Act = typename Traits::Act;
  static constexpr int kPieces = Traits::kHeadDim / 8;   // of 16 bytes, a record's
  static constexpr int kRows = 32 / kPieces;             // records a pass of a warp
  static constexpr int kPasses = (Traits::kPlainWindow - 1 + kRows - 1) / kRows;
  static constexpr int kSpanHeads = Traits::kMaxRounds * Traits::kWarps;
  static constexpr int kKeyPieces = Traits::kStateDim / 8;

  const UpdateParams& p;
  const NarrowLayout& layout;
  char* const shared;
  const int warp, lane;
  const HeadRange<Traits>& range;

  // Heads first..end-1 of all rows, of one row and group; `first` is the range's end behind the last span.
  struct Span {
    int first, end, row, id, group;  // row: its lane; id: among all rows
    RowInfo info;
  };

  // A warp's position among its heads, ahead of the work by its stages, and where the head's data lies.
  struct Walk {
    int head, rowEnd, pending;
    const char *codes, *scales, *ring, *token;
    uint32_t offset[kPasses];  // of this lane's pieces of committed records in a head's ring, bytes; kNone: none
  };
  static constexpr uint32_t kNone = 0xffffffffu;

  // Step sizes of the lane's head and records 2r, 2r + 1, as PlainScan has them.
  struct Steps {
    float record[2], token, a, skip, headScale;
  };

  __device__ uint32_t stageBarrier(int s) const {
    return sharedAddress(shared) + (warp * kMaxNarrowStages + s) * 8;
  }
  __device__ char* stage(int s) const {
    return shared + layout.privateOffset + warp * layout.privateBytes + s * layout.stageBytes;
  }
  __device__ int ringRow(const RowInfo& info, int record) const {
    const int r = info.origin + record;
    return r < p.ringRows ? r : r - p.ringRows;
  }
  __device__ bool valid(const Span& span) const { return span.first < range.end; }
  __device__ bool valid(const Walk& walk) const { return walk.head < range.end; }

  __device__ Span spanFrom(int head) const {
    const auto at = range.reading(head, 1);
    Span span{at.head, at.head, at.row, range.idOf(at.row), 0, range.info(at.row)};
    if (!valid(span)) return span;
    const int rowStart = range.rowStart(at.row), inRow = at.head - rowStart;
    span.group = inRow / p.headsPerGroup;
    const int start = span.group * p.headsPerGroup, runs = (inRow - start) / kSpanHeads + 1;
    span.end = min(rowStart + start + min(p.headsPerGroup, runs * kSpanHeads), range.end);
    return span;
  }

  // This warp's first head from `head` on.
  __device__ int ownFrom(int head) const {
    const int ahead = (head - range.begin - warp) % Traits::kWarps;
    return head + (ahead > 0 ? Traits::kWarps - ahead : -ahead);
  }

  __device__ void enter(Walk& walk, int head) const {
    const auto at = range.reading(head, Traits::kWarps);
    const RowInfo info = range.info(at.row);
    const int row = range.idOf(at.row);
    const int64_t inRow = at.head - range.rowStart(at.row), slot = info.slot;
    walk.head = at.head;
    walk.rowEnd = range.rowStart(at.row + 1);
    walk.pending = info.pending;
    walk.codes = static_cast<const char*>(p.read.data) + slot * p.read.slotBytes + inRow * Traits::kStateBytes;
    walk.scales = static_cast<const char*>(p.read.scale) + slot * p.read.scaleSlotBytes +
                  inRow * Traits::kScaleBytes + lane * 16;
    walk.ring = reinterpret_cast<const char*>(static_cast<const Act*>(p.ringValue) + slot * p.ringValueSlotStride +
                                              inRow * p.ringRows * Traits::kHeadDim);
    walk.token = reinterpret_cast<const char*>(static_cast<const Act*>(p.value.data) + row * p.value.rowStride +
                                               inRow * p.value.headStride + lane * 8);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int record = lane / kPieces + pass * kRows;
      walk.offset[pass] = lane < kRows * kPieces && record < info.pending
                              ? ringRow(info, record) * Traits::kHeadDim * 2 + lane % kPieces * 16
                              : kNone;
    }
  }
  __device__ void advance(Walk& walk) const {
    walk.head += Traits::kWarps;
    walk.codes += Traits::kWarps * Traits::kStateBytes;
    walk.scales += Traits::kWarps * Traits::kScaleBytes;
    walk.ring += Traits::kWarps * Traits::kHeadDim * 2 * p.ringRows;
    walk.token += Traits::kWarps * 2 * p.value.headStride;
    if (walk.head >= walk.rowEnd) enter(walk, walk.head);
  }

  // Starts an item's state and committed records.
  __device__ void loadCommitted(const Walk& walk, int s) const {
    const uint32_t target = sharedAddress(stage(s)), full = stageBarrier(s);
    if (lane == 0) {
      barrierExpect(full, Traits::kStateBytes);
      bulkLoad(target, walk.codes, Traits::kStateBytes, full);
    }
#pragma unroll
    for (int first = 0; first < Traits::kScaleBytes; first += 512) {
      if (first + lane * 16 < Traits::kScaleBytes) {
        pieceLoad(target + Traits::kStateBytes + first + lane * 16, walk.scales + first);
      }
    }
    const uint32_t values = target + layout.valueOffset + lane / kPieces * Traits::kValuePitch + lane % kPieces * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (walk.offset[pass] != kNone) {
        pieceLoad(values + pass * kRows * Traits::kValuePitch, walk.ring + walk.offset[pass]);
      }
    }
  }

  // And the token's value; then the stage is complete.
  __device__ void loadToken(const Walk& walk, int s) const {
    if (lane < kPieces) {
      const uint32_t values = sharedAddress(stage(s)) + layout.valueOffset;
      pieceLoad(values + walk.pending * Traits::kValuePitch + lane * 16, walk.token);
    }
    __syncwarp();
    loadsArrive(stageBarrier(s));
  }

  // Starts the committed keys of a span's group.
  __device__ void loadKeys(const Span& span) const {
    constexpr int kKeyRows = Traits::kThreads / kKeyPieces;
    const int thread = warp * 32 + lane, piece = thread % kKeyPieces;
    const Act* ring = static_cast<const Act*>(p.ringKey) + span.info.slot * p.ringKeySlotStride +
                      static_cast<int64_t>(span.group) * p.ringRows * Traits::kStateDim + piece * 8;
    const uint32_t target = sharedAddress(shared) + layout.keyOffset + piece * 16;
#pragma unroll
    for (int pass = 0; pass * kKeyRows < Traits::kPlainWindow - 1; ++pass) {
      const int record = thread / kKeyPieces + pass * kKeyRows;
      if (record < span.info.pending) {
        pieceLoad(target + record * Traits::kKeyPitch, ring + ringRow(span.info, record) * Traits::kStateDim);
      }
    }
  }

  // And the step's key and query.
  __device__ void loadVectors(const Span& span) const {
    static_assert(kKeyPieces == 16, "a warp for key and query");
    if (warp == Traits::kWarps - 1) {
      const bool key = lane < 16;
      const TokenTensor& from = key ? p.k : p.q;
      const uint32_t target = sharedAddress(shared) +
                              (key ? layout.keyOffset + span.info.pending * Traits::kKeyPitch : layout.queryOffset);
      pieceLoad(target + lane % 16 * 16, static_cast<const Act*>(from.data) +
                                             span.id * from.rowStride +
                                             span.group * from.headStride + lane % 16 * 8);
    }
    loadsArrive(sharedAddress(shared) + kLandedBarrier);
  }

  // What is known of the lane's head of the span; its use waits for it.
  __device__ Steps loadSteps(const Span& span) const {
    Steps steps{};
    const int r = lane % 8, head = ownFrom(span.first) + lane / 8 * Traits::kWarps;
    if (head >= span.end) return steps;
    const int row = span.id, inRow = head - range.rowStart(span.row);
    const float* ring = p.ringDt + span.info.slot * p.ringDtSlotStride + static_cast<int64_t>(inRow) * p.ringRows;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * r + e < span.info.pending) steps.record[e] = numberNow(ring + ringRow(span.info, 2 * r + e));
    }
    steps.token = numberNow(static_cast<const float*>(p.dt.data) + row * p.dt.rowStride + inRow * p.dt.headStride);
    steps.a = numberNow(p.a + inRow);
    if (p.skip != nullptr) steps.skip = numberNow(p.skip + inRow);
    if constexpr (Traits::kRead == StateFormat::kE2m1) {
      steps.headScale = numberNow(p.read.headScale + span.info.slot * p.read.headScaleSlotStride + inRow);
    }
    return steps;
  }

  // The first loads: what a settled launch may read before its predecessor ends, then the rest.
  __device__ Walk start(const Span& first) const {
    Walk walk;
#pragma unroll 1
    for (int inputs = 0; inputs < 2; ++inputs) {
      if (inputs == 0) {
        if (valid(first)) loadKeys(first);
      } else if (p.settled) {
        waitForPredecessor();
      }
      enter(walk, range.begin + warp);
#pragma unroll 1
      for (int s = 0; s < layout.stages && valid(walk); ++s) {
        if (inputs == 0) {
          loadCommitted(walk, s);
        } else {
          loadToken(walk, s);
        }
        advance(walk);
      }
    }
    return walk;
  }
};

}  // namespace replayssm
