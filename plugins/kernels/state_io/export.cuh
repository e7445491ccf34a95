// Checkpoint and committed records of one head -> its state in float32, as a flush would fold them. Reads only.
#pragma once

#include "columns.cuh"
#include "kernels/common/vector.cuh"

namespace replayssm {

constexpr int kExportWarps = 8;
constexpr int kExportRows = 4;  // state rows of a warp
constexpr int kBlockRows = kExportWarps * kExportRows;
constexpr int kExportMaxWindow = 64;
static_assert(kBlockRows == 32, "a lane loads one row of the values");
static_assert(kExportMaxWindow <= 32 * kExportWarps, "a thread loads one record's scalars");
static_assert(kExportRows == 4, "the values of a warp's rows are one load");

// The committed records as a block needs them, oldest first. In dynamic shared memory behind it: keys [h][N], 16 bits.
struct alignas(16) ExportRecords {
  float value[kExportMaxWindow][kBlockRows];  // x or u, later times their weight; v with re-derivation
  float weight[kExportMaxWindow];             // dt, 1 for GDN
  float decay[kExportMaxWindow];              // log-decay of the token itself
  float factor[kExportMaxWindow];             // 1 / |k|, 1 for Mamba-2
  float beta[kExportMaxWindow];               // with re-derivation
  float total;                                // decay of the checkpoint
};

template <class Act>
__device__ __forceinline__ float ringFloat16(const ExportParams& p, int64_t index) {
  return p.gdn && !p.rederives ? __half2float(static_cast<const __half*>(p.value.data)[index])
                               : Activation<Act>::toFloat(static_cast<const uint16_t*>(
                                     p.rederives ? p.v.data : p.value.data)[index]);
}

// Lanes are rows for the values and columns for the keys; warps take the records in turn.
template <class Act>
__device__ void loadRecords(const ExportParams& p, ExportRecords& records, uint16_t* keys, int slot, int head,
                            int firstRow, int h) {
  const int group = head / (p.heads / p.groups), origin = min(max(p.origin[slot], 0), p.ringRows - 1);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  auto ringRow = [&](int head, int j) {
    const int row = origin + j < p.ringRows ? origin + j : origin + j - p.ringRows;
    return static_cast<int64_t>(head) * p.ringRows + row;
  };
  const RingTensor& values = p.rederives ? p.v : p.value;
  for (int j = warp; j < h; j += kExportWarps) {
    const int row = firstRow + lane;
    const int64_t value = slot * values.slotStride + ringRow(head, j) * p.headDim + row;
    records.value[j][lane] = row < p.headDim ? ringFloat16<Act>(p, value) : 0.0f;
    const uint16_t* key = static_cast<const uint16_t*>(p.key.data) + slot * p.key.slotStride +
                          ringRow(group, j) * p.stateDim;
    for (int column = lane * kLaneColumns; column < p.stateDim; column += kChunkColumns) {
      *reinterpret_cast<uint2*>(keys + j * p.stateDim + column) = *reinterpret_cast<const uint2*>(key + column);
    }
  }
  const int j = static_cast<int>(threadIdx.x);
  if (j >= h) return;
  auto scalar = [&](const RingTensor& t, int head) {
    return static_cast<const float*>(t.data)[slot * t.slotStride + ringRow(head, j)];
  };
  const float stored = scalar(p.decay, head);
  // dt = 0 decays nothing, even at an infinite rate.
  records.decay[j] = p.gdn ? stored : stored > 0.0f ? stored * p.a[head] : 0.0f;
  records.weight[j] = p.gdn ? 1.0f : stored;
  records.factor[j] = p.gdn ? scalar(p.keyFactor, group) : 1.0f;
  records.beta[j] = p.rederives ? scalar(p.beta, head) : 0.0f;
}

// Multiplies the values by the weights of their records, and makes the checkpoint's weight. Suffix sums run from the
// newest record back and are never differences. A warp's lanes are the rows, as when they were loaded.
__device__ __forceinline__ void weighRecords(ExportRecords& records, int h) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int j = warp; j <= h; j += kExportWarps) {
    const int oldest = j < h ? j + 1 : 0;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = h - 1; i >= oldest; --i) sum += records.decay[i];
    if (j < h) {
      records.value[j][lane] *= records.weight[j] * records.factor[j] * expf(sum);
    } else if (lane == 0) {
      records.total = expf(sum);
    }
  }
}

__device__ __forceinline__ void loadState(const StateCopy& copy, int slot, int64_t row, int stateDim, int column,
                                          float (&values)[kLaneColumns]) {
  const int64_t at = slot * copy.slotStride + row * stateDim + column;
  if (copy.format == StoredFormat::kFloat32) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(copy.data) + at);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
  } else if (copy.format == StoredFormat::kFloat16) {
    unpack<__half>(*reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(copy.data) + at), values);
  } else {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(copy.data) + at);
    const int blocks = (stateDim + kChunkColumns - 1) / kChunkColumns;
    const float scale = static_cast<const float*>(copy.scale)[slot * copy.scaleSlotStride + row * blocks +
                                                              column / kChunkColumns];
#pragma unroll
    for (int v = 0; v < kLaneColumns; ++v) values[v] = e4m3Value(static_cast<uint8_t>(codes >> 8 * v)) * scale;
  }
}

template <class Act, int kChunks>
struct ExportRowState {
  float s[kExportRows][kChunks][kLaneColumns];

  __device__ __forceinline__ void load(const ExportParams& p, int slot, int head, int firstRow, int lane) {
#pragma unroll
    for (int r = 0; r < kExportRows; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int column = c * kChunkColumns + lane * kLaneColumns;
#pragma unroll
        for (int v = 0; v < kLaneColumns; ++v) s[r][c][v] = 0.0f;
        if (firstRow + r < p.headDim && column < p.stateDim) {
          loadState(p.checkpoint, slot, rowOf(head, p.headDim, firstRow + r), p.stateDim, column, s[r][c]);
        }
      }
    }
  }

  __device__ __forceinline__ void loadKey(const uint16_t* keys, int stateDim, int lane,
                                          float (&key)[kChunks][kLaneColumns]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = c * kChunkColumns + lane * kLaneColumns;
      uint2 word{};
      if (column < stateDim) word = *reinterpret_cast<const uint2*>(keys + column);
      unpack<Act>(word, key[c]);
    }
  }

  // Eq. 5: the decayed checkpoint plus each record's outer product, decayed since.
  __device__ __forceinline__ void fold(const ExportRecords& records, const uint16_t* keys, int h, int stateDim,
                                       int blockRow, int lane) {
#pragma unroll
    for (int r = 0; r < kExportRows; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int v = 0; v < kLaneColumns; ++v) s[r][c][v] *= records.total;
      }
    }
    for (int j = 0; j < h; ++j) {
      float key[kChunks][kLaneColumns];
      loadKey(keys + j * stateDim, stateDim, lane, key);
      const float4 value = *reinterpret_cast<const float4*>(&records.value[j][blockRow]);
      add(0, value.x, key);
      add(1, value.y, key);
      add(2, value.z, key);
      add(3, value.w, key);
    }
  }

  // Alg. 6: corrections derived anew, one token after the other, from the state that precedes each.
  __device__ __forceinline__ void rederive(const ExportRecords& records, const uint16_t* keys, int h, int stateDim,
                                           int blockRow, int lane) {
    for (int j = 0; j < h; ++j) {
      float key[kChunks][kLaneColumns];
      loadKey(keys + j * stateDim, stateDim, lane, key);
      const float decay = expf(records.decay[j]), factor = records.factor[j];
#pragma unroll
      for (int r = 0; r < kExportRows; ++r) {
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
          for (int v = 0; v < kLaneColumns; ++v) {
            s[r][c][v] *= decay;
            dot = fmaf(s[r][c][v], key[c][v], dot);
          }
        }
        const float u = records.beta[j] * (records.value[j][blockRow + r] - warpSum(dot) * factor);
        add(r, u * factor, key);
      }
    }
  }

  __device__ __forceinline__ void add(int r, float weighted, const float (&key)[kChunks][kLaneColumns]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int v = 0; v < kLaneColumns; ++v) s[r][c][v] = fmaf(weighted, key[c][v], s[r][c][v]);
    }
  }

  __device__ __forceinline__ void store(const ExportParams& p, int entry, int head, int firstRow, int lane) const {
#pragma unroll
    for (int r = 0; r < kExportRows; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int column = c * kChunkColumns + lane * kLaneColumns;
        if (firstRow + r >= p.headDim || column >= p.stateDim) continue;
        const int64_t row = rowOf(entry * p.heads + head, p.headDim, firstRow + r);
        *reinterpret_cast<float4*>(p.state + row * p.stateDim + column) = {s[r][c][0], s[r][c][1], s[r][c][2],
                                                                           s[r][c][3]};
      }
    }
  }
};

// Blocks: runs of kBlockRows state rows along x, heads along y, exported states along z.
template <class Act, int kChunks>
__global__ void __launch_bounds__(32 * kExportWarps, 4) exportKernel(const __grid_constant__ ExportParams p) {
  extern __shared__ __align__(16) char shared[];
  ExportRecords& records = *reinterpret_cast<ExportRecords*>(shared);
  uint16_t* const keys = reinterpret_cast<uint16_t*>(shared + sizeof(ExportRecords));
  const int head = static_cast<int>(blockIdx.y), entry = static_cast<int>(blockIdx.z);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int blockRow = warp * kExportRows, firstRow = static_cast<int>(blockIdx.x) * kBlockRows;
  const int slot = p.slot[entry * p.slotStride];
  ExportRowState<Act, kChunks> rows{};
  if (slot >= 0 && slot < p.slots) {
    const int h = min(max(p.pending[slot], 0), p.window);
    rows.load(p, slot, head, firstRow + blockRow, lane);
    loadRecords<Act>(p, records, keys, slot, head, firstRow, h);
    __syncthreads();
    if (p.rederives) {
      rows.rederive(records, keys, h, p.stateDim, blockRow, lane);
    } else {
      weighRecords(records, h);
      __syncthreads();
      rows.fold(records, keys, h, p.stateDim, blockRow, lane);
    }
  }
  rows.store(p, entry, head, firstRow + blockRow, lane);
}

}  // namespace replayssm
