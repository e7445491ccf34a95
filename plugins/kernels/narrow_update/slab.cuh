// A slab, 16 state rows, in a warp's registers as float32: decoded from a checkpoint in shared memory, and encoded into
// one. Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of every 64 columns, columns 16c..16c+15, in two
// pieces of eight (slabColumn): a block of NVFP4 is a lane's.
#pragma once

#include "../common/philox.cuh"
#include "../replay_update/readout.cuh"
#include "traits.cuh"

namespace replayssm {

using SlabPiece = float[8];
using Slab = SlabPiece[4][2];  // [piece][row g or g + 8][column]

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Largest magnitude of a piece; NaN where there is one.
__device__ __forceinline__ float largestOf(const SlabPiece& x) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(x[i])));
  return largest;
}

__device__ __forceinline__ float leastOf(const SlabPiece& x) {
  float least = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) least = fminf(least, fabsf(x[i]));
  return least;
}

// The largest magnitude of its finite numbers.
__device__ __forceinline__ float largestFinite(const SlabPiece& x) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float magnitude = fabsf(x[i]);
    largest = fmaxf(largest, magnitude < __uint_as_float(kInfinityBits) ? magnitude : 0.0f);
  }
  return largest;
}

// Of two pieces, the largest magnitude of their finite numbers; finite: all of the lane's numbers are.
__device__ __forceinline__ float largestOf(const SlabPiece& low, const SlabPiece& high, bool finite) {
  float largest = largestOf(low);
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(largestOf(high)));
  if (!__all_sync(kAllLanes, finite)) largest = fmaxf(largestFinite(low), largestFinite(high));
  return largest;
}

// Largest finite magnitudes of a lane's rows g and g + 8.
struct SlabMaxima {
  float row[2];
  bool finite;  // all of the lane's numbers

  __device__ __forceinline__ explicit SlabMaxima(const Slab& s) {
    float largest = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = largestOf(s[0][half]);
#pragma unroll
      for (int b = 1; b < 4; ++b) asm("max.NaN.f32 %0, %0, %1;" : "+f"(row[half]) : "f"(largestOf(s[b][half])));
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(row[half]));
    }
    finite = largest < __uint_as_float(kInfinityBits);
    if (__all_sync(kAllLanes, finite)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = 0.0f;
#pragma unroll
      for (int b = 0; b < 4; ++b) row[half] = fmaxf(row[half], largestFinite(s[b][half]));
    }
  }
  __device__ __forceinline__ float all() const { return fmaxf(row[0], row[1]); }
};

// A lane's 16 columns of every 64 of a row, pieces 2 block and 2 block + 1.
struct SlabRun {
  const SlabPiece &low, &high;
  bool finite;  // all of the lane's numbers
  int block, half;

  __device__ __forceinline__ const SlabPiece& piece(int i) const { return i == 0 ? low : high; }
  // Magnitude, of the finite numbers. It is found again: nothing but the slab is kept over runs.
  __device__ __forceinline__ float largest() const { return largestOf(low, high, finite); }
};

// Runs of a slab in turn, kAtOnce of them in code: with fewer than four the slab moves up in its registers, and is lost.
// An instruction cache that does not hold a slab's way costs more than that.
template <int kAtOnce, class Each>
__device__ __forceinline__ void eachRun(Slab& s, bool finite, Each each) {
  static_assert(kAtOnce == 4 || kAtOnce == 2 || kAtOnce == 1, "whole passes");
#pragma unroll 1
  for (int first = 0;; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int b = i / 2 * 2, half = i % 2, run = first + i;
      each(SlabRun{s[b][half], s[b + 1][half], finite, run / 2, run % 2});
    }
    if (first + kAtOnce == 4) return;
#pragma unroll
    for (int i = 0; i + kAtOnce < 4; ++i) {
      const int from = i + kAtOnce;
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        s[i / 2 * 2 + e / 8][i % 2][e % 8] = s[from / 2 * 2 + e / 8][from % 2][e % 8];
      }
    }
  }
}

// A piece whose eight numbers, but for their scale, are given as float16.
__device__ __forceinline__ void unpackHalves(SlabPiece& x, uint4 piece, float scale) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = both.x * scale;
    x[2 * i + 1] = both.y * scale;
  }
}

// Which eight of its head's elements a piece is; row: of the head.
template <bool kExchanged>
__device__ __forceinline__ uint32_t octetOf(int row, int b, int lane) {
  return static_cast<uint32_t>(row * 16 + slabColumn<kExchanged>(b, lane % 4) / 8);
}

// Two numbers cut off to float16, the first in the lower half; beyond the range the largest finite one.
__device__ __forceinline__ uint32_t truncatedHalves(float low, float high) {
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Element i of a piece takes this word's complement: the draws of two counters (StateRandom::complements).
__device__ __forceinline__ uint32_t complementOf(const PhiloxWords* draws, int i) { return draws[i / 4].word[i % 4]; }

// Numbers of a format that keeps all but the kCut lowest bits, stochastically rounded once those are cut off: adding
// what a word leaves of a step rounds up iff the word is below the fraction, which has no more than kCut bits. That
// holds between the format's smallest normal number and infinity.
template <int kCut>
__device__ __forceinline__ void addDraws(float (&sum)[8], const SlabPiece& x, const PhiloxWords* draws) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] = __uint_as_float(__float_as_uint(x[i]) + (complementOf(draws, i) >> (32 - kCut)));
  }
}

// A slab as it lies in global memory, from shared memory, 512 bytes at a time: a lane's own 16 bytes would leave half
// of every sector to a later store, which costs the L2 twice as much. For a warp, once all lanes have written their
// part.
template <int kBytes>
__device__ __forceinline__ void copyRows(char* to, const char* from, int lane) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBytes / 512; ++i) {
    reinterpret_cast<uint4*>(to)[i * 32 + lane] = reinterpret_cast<const uint4*>(from)[i * 32 + lane];
  }
  __syncwarp();
}

// Codecs: decode() takes a slab out of shared memory. An Encoder writes one to global memory, a run after another, to
// nearest or stochastically; finish() follows the last. What would be half sectors goes by way of `room`. Where kExchanged,
// two lanes' pieces are (see slabColumn).
template <StateFormat kFormat, bool kExchanged>
struct SlabCodec;

}  // namespace replayssm
