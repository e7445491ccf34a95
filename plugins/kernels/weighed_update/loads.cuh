// What one item of GDN loads beside its state.
#pragma once

#include "../replay_update/loader.cuh"
#include "traits.cuh"

namespace replayssm::weighed {

template <class Traits>
struct RecordLoader : LoaderBase<Traits> {
  using Act = typename Traits::Act;
  using LoaderBase<Traits>::p;
  using LoaderBase<Traits>::layout;
  using LoaderBase<Traits>::thread;
  using LoaderBase<Traits>::threads;

  // Lines of `count` rows of `bytes` bytes, `stride` bytes apart, into the L2.
  __device__ void prefetchRows(const void* first, int64_t stride, int bytes, int count) const {
    const int pieces = (bytes + 63) / 64;
    for (int i = thread; i < count * pieces; i += threads) {
      prefetchLine(static_cast<const char*>(first) + i / pieces * stride + i % pieces * 64);
    }
  }

  // What a step reads besides the state and the ring. Its address is known before its predecessor has written it.
  __device__ void prefetchInputs(int row, int head, int group) const {
    if (thread == 0) prefetchLine(p.slot + row * p.slotStride);
    if (thread == 1) prefetchLine(p.numTokens + row * p.numTokensStride);
    const auto rows = [&](const TokenTensor& t, int index, int size, int bytes) {
      const char* data = static_cast<const char*>(t.data) + (row * t.rowStride + index * t.headStride) * size;
      prefetchRows(data, t.tokenStride * size, bytes, p.tokens);
    };
    rows(p.value, head, 2, Traits::kHeadDim * 2);
    rows(p.k, group, 2, Traits::kStateDim * 2);
    rows(p.q, group, 2, Traits::kStateDim * 2);
    rows(p.dt, head, 4, 4);
    rows(p.beta, head, 4, 4);
  }

  // The whole ring, while the cursors that tell which of it matters are on their way.
  __device__ void prefetchRing(const RowInfo& info, int head, int group, int part) const {
    prefetchRows(this->ringValues(info, head) + part * Traits::kRows, Traits::kHeadDim * 2, Traits::kRows * 2, p.ringRows);
    prefetchRows(this->ringKeys(info, group), Traits::kStateDim * 2, Traits::kStateDim * 2, p.ringRows);
    prefetchRows(this->ringDt(info, head), 0, p.ringRows * 4, 1);
    prefetchRows(ringFactors(info, group), 0, p.ringRows * 4, 1);
  }

  // Records first .. last - 1 of the ring from row 0 at `ring` on, and of this step from token 0 at `tokens` on: pieces of 16
  // bytes, neighbouring threads side by side.
  template <int kPieces, class T>
  __device__ void rows(const RowInfo& info, int first, int last, uint32_t target, int pitch, const T* ring, int rowElements,
                       const T* tokens, int64_t tokenStride) const {
    const int piece = thread % kPieces, step = threads / kPieces;  // threads: whole rows of pieces
    int j = first + thread / kPieces;
#pragma unroll 1
    for (; j < min(last, info.pending); j += step) {
      pieceLoad(target + j * pitch + piece * 16, ring + this->ringRow(info, j) * rowElements + piece * 8);
    }
    const T* from = tokens + (j - info.pending) * tokenStride + piece * 8;
    uint32_t to = target + j * pitch + piece * 16;
#pragma unroll 4
    for (; j < last; j += step) {
      pieceLoad(to, from);
      from += step * tokenStride;
      to += step * pitch;
    }
  }

  __device__ const float* ringFactors(const RowInfo& info, int group) const {
    return p.ringKeyFactor + info.slot * p.ringKeyFactorSlotStride + static_cast<int64_t>(group) * p.ringRows;
  }

  // Keys of records first .. last - 1.
  __device__ void keys(const RowInfo& info, int row, int group, int first, int last, uint32_t target) const {
    const Act* ring = this->ringKeys(info, group);
    const Act* keys = static_cast<const Act*>(p.k.data) + row * p.k.rowStride + group * p.k.headStride;
    rows<Traits::kStateDim / 8>(info, first, last, target, Traits::kKeyPitch, ring, Traits::kStateDim, keys, p.k.tokenStride);
  }

  // Factors of the committed keys.
  __device__ void factors(const RowInfo& info, int group, uint32_t target) const {
    const float* factors = ringFactors(info, group);
#pragma unroll 1
    for (int j = thread; j < info.pending; j += threads) {
      wordLoad(target + layout.factorOffset + j * 4, factors + this->ringRow(info, j));
    }
  }

  // Queries of this step, behind the keys; they do not depend on the cursors.
  __device__ void queries(const RowInfo& info, int row, int group, uint32_t target) const {
    const Act* queries = static_cast<const Act*>(p.q.data) + row * p.q.rowStride + group * p.q.headStride;
    const RowInfo tokens{info.slot, info.tokens, 0, 0};  // no records before them
    rows<Traits::kStateDim / 8>(tokens, 0, info.tokens, target + layout.queryOffset, Traits::kKeyPitch, queries, 0, queries,
                                p.q.tokenStride);
  }

  // Values of records first .. last - 1: kRows elements of each, from `column` on.
  template <int kRows>
  __device__ void values(const RowInfo& info, int row, int head, int first, int last, int column,
                         uint32_t target) const {
    const Act* ring = this->ringValues(info, head) + column;
    const Act* values =
        static_cast<const Act*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride + column;
    rows<kRows / 8>(info, first, last, target + column * 2, Traits::kValuePitch, ring, Traits::kHeadDim, values,
                    p.value.tokenStride);
  }

  // Log-decays of records first .. last - 1.
  __device__ void numbers(const RowInfo& info, int row, int head, int first, int last, uint32_t target) const {
    const float* decays = this->ringDt(info, head);
    const float* dt = static_cast<const float*>(p.dt.data) + row * p.dt.rowStride + head * p.dt.headStride;
#pragma unroll 1
    for (int j = first + thread; j < last; j += threads) {
      int token = j - info.pending;
      wordLoad(target + layout.dtOffset + j * 4, token < 0 ? decays + this->ringRow(info, j) : dt + token * p.dt.tokenStride);
    }
  }

  // Beta of this step's tokens.
  __device__ void rates(const RowInfo& info, int row, int head, uint32_t target) const {
    const float* beta = static_cast<const float*>(p.beta.data) + row * p.beta.rowStride + head * p.beta.headStride;
    if (thread < info.tokens) wordLoad(target + layout.scalarOffset + thread * 4, beta + thread * p.beta.tokenStride);
  }
};

}  // namespace replayssm::weighed
