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

// The larger number; NaN where there is one.
__device__ __forceinline__ float maximum(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

// Largest magnitude of a piece; NaN where there is one.
__device__ __forceinline__ float largestOf(const SlabPiece& x) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = maximum(largest, fabsf(x[i]));
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

// Of two pieces, the largest magnitude of their finite numbers; bounded: all of the lane's numbers are.
__device__ __forceinline__ float largestOf(const SlabPiece& low, const SlabPiece& high, bool bounded) {
  const float largest = maximum(largestOf(low), largestOf(high));
  return __all_sync(kAllLanes, bounded) ? largest : fmaxf(largestFinite(low), largestFinite(high));
}

// Largest finite magnitudes of a lane's runs and of its rows g and g + 8.
struct SlabMaxima {
  float run[2][2];  // [block][half]
  float row[2];
  bool bounded;  // all of the lane's numbers are finite, and within float16's range

  __device__ __forceinline__ explicit SlabMaxima(const Slab& s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      run[i / 2][i % 2] = maximum(largestOf(s[i / 2 * 2][i % 2]), largestOf(s[i / 2 * 2 + 1][i % 2]));
    }
    setRows();
    bounded = maximum(row[0], row[1]) < 65504.0f;
    if (__all_sync(kAllLanes, bounded)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      run[i / 2][i % 2] = fmaxf(largestFinite(s[i / 2 * 2][i % 2]), largestFinite(s[i / 2 * 2 + 1][i % 2]));
    }
    setRows();
  }
  __device__ __forceinline__ void setRows() {
    row[0] = maximum(run[0][0], run[1][0]);
    row[1] = maximum(run[0][1], run[1][1]);
  }
  __device__ __forceinline__ float all() const { return fmaxf(row[0], row[1]); }
};

// Hidden from the compiler, which would rather select than branch.
__device__ __forceinline__ float moved(float x) {
  float to;
  asm volatile("mov.b32 %0, %1;" : "=f"(to) : "f"(x));
  return to;
}

// A lane's 16 columns of every 64 of a row, pieces 2 block and 2 block + 1. kKept: their largest magnitude is `known`;
// without, it is found again where it is asked for.
template <bool kKept>
struct SlabRun {
  const SlabPiece &low, &high;
  float known;
  bool bounded;  // of the slab (SlabMaxima)
  int block, half;

  __device__ __forceinline__ const SlabPiece& piece(int i) const { return i == 0 ? low : high; }
  // Magnitude, of the finite numbers. For all lanes together, never behind a lane's own condition: it may vote.
  __device__ __forceinline__ float largest() const { return kKept ? known : largestOf(low, high, bounded); }
};

// Runs of a slab in turn.
template <RunOrder kOrder, class Each>
__device__ __forceinline__ void eachRun(Slab& s, const SlabMaxima& maxima, Each each) {
  if constexpr (kOrder == RunOrder::kUnrolled) {
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const int block = run / 2, half = run % 2;
      each(SlabRun<true>{s[2 * block][half], s[2 * block + 1][half], maxima.run[block][half], maxima.bounded, block, half});
    }
  } else if constexpr (kOrder == RunOrder::kCopied) {
#pragma unroll 1
    for (int run = 0; run < 4; ++run) {
      SlabPiece own[2];
      float largest;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (run != i) continue;
        const int block = i / 2, half = i % 2;
#pragma unroll
        for (int e = 0; e < 16; ++e) own[e / 8][e % 8] = moved(s[2 * block + e / 8][half][e % 8]);
        largest = moved(maxima.run[block][half]);
      }
      each(SlabRun<true>{own[0], own[1], largest, maxima.bounded, run / 2, run % 2});
    }
  } else {
#pragma unroll 1
    for (int run = 0;; ++run) {
      each(SlabRun<false>{s[0][0], s[1][0], 0.0f, maxima.bounded, run / 2, run % 2});
      if (run == 3) return;
#pragma unroll
      for (int to = 0; to < 3; ++to) {
        const int from = to + 1;
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          s[to / 2 * 2 + e / 8][to % 2][e % 8] = s[from / 2 * 2 + e / 8][from % 2][e % 8];
        }
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

// Draws of kPieces pieces from `first` on of a run, two counters each. row: of the run's half of the slab, within the head.
template <bool kExchanged, int kPieces>
__device__ __forceinline__ void drawPieces(PhiloxWords (&draws)[2 * kPieces], const StateRandom& random, int row, int first,
                                           int lane) {
  uint32_t quads[2 * kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    quads[2 * i] = 2 * octetOf<kExchanged>(row, first + i, lane);
    quads[2 * i + 1] = quads[2 * i] + 1;
  }
  random.complements(draws, quads);
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
// part. Eight loads are on their way before the first store.
template <int kBytes>
__device__ __forceinline__ void copyRows(char* to, const char* from, int lane) {
  constexpr int kAtOnce = kBytes / 512 < 8 ? kBytes / 512 : 8;
  __syncwarp();
#pragma unroll
  for (int first = 0; first < kBytes / 512; first += kAtOnce) {
    uint4 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) words[i] = reinterpret_cast<const uint4*>(from)[(first + i) * 32 + lane];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) reinterpret_cast<uint4*>(to)[(first + i) * 32 + lane] = words[i];
  }
  __syncwarp();
}

// Codecs: decode() takes a slab out of shared memory. An Encoder writes one to global memory, a run after another:
// stochastic() and nearest() go the straight way and tell whether the lane's codes are right (those of
// kNearestIsStraight always are), the same with Anyway go the long one, store() follows either. finish() follows the last
// run. What would be half sectors goes by way of `room`. Where kExchanged, two lanes' pieces are (see slabColumn).
template <StateFormat kFormat, bool kExchanged>
struct SlabCodec;

}  // namespace replayssm
