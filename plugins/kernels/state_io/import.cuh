// A float32 state -> both checkpoint copies of one head, each rounded from it as a flush rounds.
#pragma once

#include "columns.cuh"
#include "kernels/common/e2m1.cuh"
#include "kernels/common/float16.cuh"
#include "kernels/common/philox.cuh"

namespace replayssm {

constexpr int kImportWarps = 8;

// Magnitude for a scale: only finite values count.
__device__ __forceinline__ float finiteMagnitude(float x) { return fabsf(x) < INFINITY ? fabsf(x) : 0.0f; }

struct Quad {
  float x[kLaneColumns];
  __device__ __forceinline__ float amax() const {
    return fmaxf(fmaxf(finiteMagnitude(x[0]), finiteMagnitude(x[1])),
                 fmaxf(finiteMagnitude(x[2]), finiteMagnitude(x[3])));
  }
};

// Where a lane's quad lies: of which slot, row among [H, P], first column; `inside` the state at all.
struct QuadPlace {
  int slot;
  int64_t row;
  int column, stateDim, lane;
  bool inside;
  __device__ __forceinline__ int64_t at(const StateCopy& copy) const {
    return slot * copy.slotStride + row * stateDim + column;
  }
};

// Float16 bits of a quad.
__device__ __forceinline__ void storeHalves(const StateCopy& copy, const QuadPlace& place, const uint16_t (&bits)[4]) {
  const uint2 word = {bits[0] | static_cast<uint32_t>(bits[1]) << 16, bits[2] | static_cast<uint32_t>(bits[3]) << 16};
  if (place.inside) *reinterpret_cast<uint2*>(static_cast<uint16_t*>(copy.data) + place.at(copy)) = word;
}

// E4M3 codes of a quad and, once a block of 128, its scale. `encode` maps a scaled value and its index to a code.
template <class Encode>
__device__ __forceinline__ void storeE4m3(const StateCopy& copy, const QuadPlace& place, const Quad& quad,
                                          Encode encode) {
  const float scale = e4m3Scale(teamMax(quad.amax(), 32)), factor = inverse(scale);
  uint32_t word = 0;
#pragma unroll
  for (int v = 0; v < kLaneColumns; ++v) {
    word |= static_cast<uint32_t>(encode(quad.x[v] * factor, v)) << 8 * v;
  }
  if (place.inside) *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(copy.data) + place.at(copy)) = word;
  if (place.lane == 0) {
    const int blocks = (place.stateDim + kChunkColumns - 1) / kChunkColumns;
    float* scales = static_cast<float*>(copy.scale) + place.slot * copy.scaleSlotStride;
    scales[place.row * blocks + place.column / kChunkColumns] = scale;
  }
}

// E2M1 codes of a quad and, once a block of 16, the block's scale.
__device__ __forceinline__ void storeE2m1(const StateCopy& copy, const QuadPlace& place, const Quad& quad,
                                          float headScale) {
  const float largest = teamMax(quad.amax(), kE2m1Block / kLaneColumns);
  const uint8_t block = nvfp4BlockScale(largest, nvfp4BlockFactor(headScale));
  const float factor = inverse(nvfp4Scale(block, headScale));
  uint32_t word = 0;
#pragma unroll
  for (int v = 0; v < kLaneColumns; ++v) word |= e2m1Nearest(quad.x[v] * factor) << 4 * v;
  if (!place.inside) return;
  *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(copy.data) + place.at(copy) / 2) = static_cast<uint16_t>(word);
  if (place.column % kE2m1Block == 0) {
    uint8_t* scales = static_cast<uint8_t*>(copy.scale) + place.slot * copy.scaleSlotStride;
    scales[place.row * (place.stateDim / kE2m1Block) + place.column / kE2m1Block] = block;
  }
}

__device__ __forceinline__ void storeCheckpoint(const StateCopy& copy, const QuadPlace& place, const Quad& quad,
                                                const StateRandom& random, uint32_t element) {
  if (copy.format == StoredFormat::kFloat32) {
    float4* at = reinterpret_cast<float4*>(static_cast<float*>(copy.data) + place.at(copy));
    if (place.inside) *at = {quad.x[0], quad.x[1], quad.x[2], quad.x[3]};
    return;
  }
  const PhiloxWords words = random.words(element / 4);
  if (copy.format == StoredFormat::kFloat16) {
    uint16_t bits[kLaneColumns];
#pragma unroll
    for (int v = 0; v < kLaneColumns; ++v) bits[v] = halfStochastic(quad.x[v], words.word[v]);
    storeHalves(copy, place, bits);
    return;
  }
  storeE4m3(copy, place, quad, [&](float x, int v) { return e4m3Stochastic(x, words.word[v]); });
}

__device__ __forceinline__ void storeRead(const StateCopy& copy, const QuadPlace& place, const Quad& quad,
                                          float headScale) {
  if (copy.format == StoredFormat::kFloat16) {
    uint16_t bits[kLaneColumns];
#pragma unroll
    for (int v = 0; v < kLaneColumns; ++v) bits[v] = halfNearest(quad.x[v]);
    storeHalves(copy, place, bits);
  } else if (copy.format == StoredFormat::kE4m3) {
    storeE4m3(copy, place, quad, [](float x, int) { return e4m3Nearest(x); });
  } else if (copy.format == StoredFormat::kE2m1) {
    storeE2m1(copy, place, quad, headScale);
  }
}

// The scale of an E2M1 copy needs the whole head's largest magnitude before anything is written.
__device__ __forceinline__ float headScaleOf(const float* state, int elements, float* shared) {
  float amax = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += blockDim.x) {
    amax = fmaxf(amax, finiteMagnitude(state[i]));
  }
  amax = teamMax(amax, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
  __syncthreads();
  for (int warp = 0; warp < kImportWarps; ++warp) amax = fmaxf(amax, shared[warp]);
  return nvfp4HeadScale(amax);
}

// Blocks: heads along x, imported states along y. Warps take state rows in turn.
__global__ void __launch_bounds__(32 * kImportWarps) importKernel(const __grid_constant__ ImportParams p) {
  __shared__ float largest[kImportWarps];
  const int head = static_cast<int>(blockIdx.x), entry = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int slot = p.slot[entry * p.slotStride];
  if (slot < 0 || slot >= p.slots) return;
  const float* state = p.state + rowOf(entry * p.heads + head, p.headDim, 0) * p.stateDim;
  float headScale = 1.0f;
  if (p.read.format == StoredFormat::kE2m1) {
    headScale = headScaleOf(state, p.headDim * p.stateDim, largest);
    if (threadIdx.x == 0) p.read.headScale[slot * p.read.headScaleSlotStride + head] = headScale;
  }
  StateRandom random{};
  if (p.checkpoint.format != StoredFormat::kFloat32) {
    random.seed = static_cast<uint64_t>(p.seed[entry * p.seedStride]);
    random.layerHead = static_cast<uint32_t>(p.layer) << 16 | static_cast<uint32_t>(p.headOffset + head);
    random.position = static_cast<uint32_t>(p.position[entry * p.positionStride]);
  }
  for (int row = warp; row < p.headDim; row += kImportWarps) {
    for (int first = 0; first < p.stateDim; first += kChunkColumns) {
      const int column = first + lane * kLaneColumns;
      const QuadPlace place{slot, rowOf(head, p.headDim, row), column, p.stateDim, lane, column < p.stateDim};
      const int element = row * p.stateDim + column;
      Quad quad{};
      if (place.inside) {
        const float4 four = *reinterpret_cast<const float4*>(state + element);
        quad = {{four.x, four.y, four.z, four.w}};
      }
      storeCheckpoint(p.checkpoint, place, quad, random, static_cast<uint32_t>(element));
      storeRead(p.read, place, quad, headScale);
    }
  }
}

}  // namespace replayssm
