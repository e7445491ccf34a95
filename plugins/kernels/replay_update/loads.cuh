// What one item of Mamba-2 loads beside its state.
#pragma once

#include "loader.cuh"
#include "traits.cuh"

namespace replayssm {

template <class Traits>
struct RecordLoader : LoaderBase<Traits> {
  using Act = typename Traits::Act;
  using LoaderBase<Traits>::p;
  using LoaderBase<Traits>::layout;
  using LoaderBase<Traits>::thread;
  using LoaderBase<Traits>::threads;

  // The same by all threads: 16-byte pieces, neighbouring threads side by side.
  template <int kPieces>
  __device__ void ringPieces(const RowInfo& info, const Act* ring, uint32_t target) const {
#pragma unroll 4
    for (int i = thread; i < info.pending * kPieces; i += threads) {
      const int j = i / kPieces, piece = i % kPieces;
      pieceLoad(target + i * 16, ring + this->ringRow(info, j) * kPieces * 8 + piece * 8);
    }
  }

  // Rows of this step's tokens, side by side.
  template <int kPieces>
  __device__ void tokenRows(const RowInfo& info, const Act* rows, int64_t stride, uint32_t target) const {
    if constexpr (Traits::kSingle) {
      if (thread < kPieces) pieceLoad(target + thread * 16, rows + thread * 8);
    } else {
#pragma unroll 1
      for (int i = thread; i < info.tokens * kPieces; i += threads) {
        const int token = i / kPieces, piece = i % kPieces;
        pieceLoad(target + i * 16, rows + token * stride + piece * 8);
      }
    }
  }

  // Keys of the committed records, then of this step.
  __device__ void committedKeys(const RowInfo& info, int group, uint32_t target) const {
    ringPieces<Traits::kStateDim / 8>(info, this->ringKeys(info, group), target);
  }
  __device__ void bulkKeys(const RowInfo& info, int group, uint32_t target, uint32_t barrier) const {
    this->bulkRows(info, this->ringKeys(info, group), Traits::kKeyPitch, target, barrier);
  }
  __device__ void tokenKeys(const RowInfo& info, int row, int group, uint32_t target) const {
    const Act* keys = static_cast<const Act*>(p.k.data) + row * p.k.rowStride + group * p.k.headStride;
    tokenRows<Traits::kStateDim / 8>(info, keys, p.k.tokenStride, target + info.pending * Traits::kKeyPitch);
  }

  // Queries of this step, behind the keys; they do not depend on the cursors.
  __device__ void queries(const RowInfo& info, int row, int group, uint32_t target) const {
    const Act* queries = static_cast<const Act*>(p.q.data) + row * p.q.rowStride + group * p.q.headStride;
    tokenRows<Traits::kStateDim / 8>(info, queries, p.q.tokenStride, target + layout.queryOffset);
  }

  // Values of the committed records, then of this step.
  __device__ void committedValues(const RowInfo& info, int head, uint32_t stage) const {
    ringPieces<Traits::kHeadDim / 8>(info, this->ringValues(info, head), stage + layout.valueOffset);
  }
  __device__ void bulkValues(const RowInfo& info, int head, uint32_t stage, uint32_t barrier) const {
    this->template bulkRows<true>(info, this->ringValues(info, head), Traits::kValuePitch, stage + layout.valueOffset,
                                  barrier);
  }
  __device__ void tokenValues(const RowInfo& info, int row, int head, uint32_t stage) const {
    const Act* values = static_cast<const Act*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride;
    tokenRows<Traits::kHeadDim / 8>(info, values, p.value.tokenStride,
                                    stage + layout.valueOffset + info.pending * Traits::kValuePitch);
  }

  // dt of all records and the head's scalars.
  __device__ void numbers(const RowInfo& info, int row, int head, uint32_t stage) const {
    const int total = info.pending + info.tokens;
    const float* decays = this->ringDt(info, head);
    const float* dt = static_cast<const float*>(p.dt.data) + row * p.dt.rowStride + head * p.dt.headStride;
#pragma unroll 1
    for (int j = thread; j < total; j += threads) {
      int token = j - info.pending;
      wordLoad(stage + layout.dtOffset + j * 4, token < 0 ? decays + this->ringRow(info, j) : dt + token * p.dt.tokenStride);
    }
    if (thread == 0) wordLoad(stage + layout.scalarOffset, p.a + head);
    if (thread == 1 && p.skip != nullptr) wordLoad(stage + layout.scalarOffset + 4, p.skip + head);
  }
};

}  // namespace replayssm
