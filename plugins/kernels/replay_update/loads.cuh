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

  // Keys of the committed records and of this step; 16-byte pieces, neighbouring threads side by side.
  __device__ void keys(const RowInfo& info, int row, int group, uint32_t target) const {
    constexpr int kPieces = Traits::kStateDim / 8;
    const Act* ring = this->ringKeys(info, group);
    const Act* keys = static_cast<const Act*>(p.k.data) + row * p.k.rowStride + group * p.k.headStride;
#pragma unroll 4
    for (int i = thread; i < (info.pending + info.tokens) * kPieces; i += threads) {
      int j = i / kPieces, piece = i % kPieces;
      const Act* source = j < info.pending ? ring + this->ringRow(info, j) * Traits::kStateDim
                                           : keys + (j - info.pending) * p.k.tokenStride;
      pieceLoad(target + j * Traits::kKeyPitch + piece * 16, source + piece * 8);
    }
  }

  // Queries of this step, behind the keys; they do not depend on the cursors.
  __device__ void queries(const RowInfo& info, int row, int group, uint32_t target) const {
    constexpr int kPieces = Traits::kStateDim / 8;
    const Act* queries = static_cast<const Act*>(p.q.data) + row * p.q.rowStride + group * p.q.headStride;
#pragma unroll 1
    for (int i = thread; i < info.tokens * kPieces; i += threads) {
      int token = i / kPieces, piece = i % kPieces;
      pieceLoad(target + layout.queryOffset + token * Traits::kKeyPitch + piece * 16,
                queries + token * p.q.tokenStride + piece * 8);
    }
  }

  // Values, dt and the head's scalars of an item.
  __device__ void records(const RowInfo& info, int row, int head, uint32_t stage) const {
    constexpr int kPieces = Traits::kHeadDim / 8;
    int total = info.pending + info.tokens;
    const Act* committed = this->ringValues(info, head);
    const float* decays = this->ringDt(info, head);
    const Act* values = static_cast<const Act*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride;
    const float* dt = static_cast<const float*>(p.dt.data) + row * p.dt.rowStride + head * p.dt.headStride;
#pragma unroll 4
    for (int i = thread; i < total * kPieces; i += threads) {
      int j = i / kPieces, piece = i % kPieces;
      int token = j - info.pending;
      const Act* value =
          token < 0 ? committed + this->ringRow(info, j) * Traits::kHeadDim : values + token * p.value.tokenStride;
      pieceLoad(stage + layout.valueOffset + j * Traits::kValuePitch + piece * 16, value + piece * 8);
    }
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
