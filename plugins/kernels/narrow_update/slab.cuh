// A slab, 16 state rows, in a warp's registers as float32: decoded from a checkpoint in shared memory, and encoded into
// one. Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
#pragma once

#include "../common/divide.cuh"
#include "../common/e2m1.cuh"
#include "../common/float16.cuh"
#include "../common/philox.cuh"
#include "../replay_update/readout.cuh"
#include "formats.cuh"

namespace replayssm {

using Slab = float[4][2][8];  // [block of 32 columns][row g or g + 8][column]

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Bits of the largest magnitude of eight numbers: at least infinity's when one is not finite.
__device__ __forceinline__ uint32_t largestBits(const float (&x)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  return largest;
}

// A folded slab waits in shared memory to be encoded, each lane's pieces by themselves: 16 bytes of every lane side by
// side, so that nothing collides.
struct ParkedSlab {
  float4* at;

  __device__ ParkedSlab(char* slab, int lane) : at(reinterpret_cast<float4*>(slab) + lane) {}

  __device__ __forceinline__ void put(const float (&block)[2][8], int b) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&x)[8] = block[half];
      at[(4 * b + 2 * half) * 32] = make_float4(x[0], x[1], x[2], x[3]);
      at[(4 * b + 2 * half + 1) * 32] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
  __device__ __forceinline__ void put(const Slab& s) const {
#pragma unroll
    for (int b = 0; b < 4; ++b) put(s[b], b);
  }
  __device__ __forceinline__ void get(float (&x)[8], int b, int half) const {
    const float4 low = at[(4 * b + 2 * half) * 32], high = at[(4 * b + 2 * half + 1) * 32];
    x[0] = low.x;
    x[1] = low.y;
    x[2] = low.z;
    x[3] = low.w;
    x[4] = high.x;
    x[5] = high.y;
    x[6] = high.z;
    x[7] = high.w;
  }
};

// Largest finite magnitude of eight numbers, given the above.
__device__ __forceinline__ float largestFinite(const float (&x)[8], uint32_t bits) {
  if (bits < kInfinityBits) return __uint_as_float(bits);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float magnitude = fabsf(x[i]);
    largest = fmaxf(largest, magnitude < __uint_as_float(kInfinityBits) ? magnitude : 0.0f);
  }
  return largest;
}

// The same without it: a maximum takes no notice of NaN.
__device__ __forceinline__ float largestFinite(const float (&x)[8]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
  return largest < __uint_as_float(kInfinityBits) ? largest : largestFinite(x, kInfinityBits);
}

// Of the lane's columns of row g or g + 8.
__device__ __forceinline__ float largestOfRow(const ParkedSlab& s, int half) {
  float largest = 0.0f;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    float x[8];
    s.get(x, b, half);
    largest = fmaxf(largest, largestFinite(x));
  }
  return largest;
}

// Which quad of its head's elements a lane's first four columns of block b are.
__device__ __forceinline__ uint32_t firstQuad(int row, int b, int lane) {
  return static_cast<uint32_t>(row * 32 + b * 8 + lane % 4 * 2);
}

// Two numbers cut off to float16, the first in the lower half; beyond the range the largest finite one.
__device__ __forceinline__ uint32_t truncatedHalves(uint32_t low, uint32_t high) {
  uint32_t pair;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(__uint_as_float(high)), "f"(__uint_as_float(low)));
  return pair;
}

// x / scale with x's sign: the argument of a rounding.
__device__ __forceinline__ float quotientOf(const Quotient& quotient, float x) {
  return __uint_as_float(__float_as_uint(quotient(fabsf(x))) | (__float_as_uint(x) & 0x80000000u));
}

// A lane's piece of a block: row g or g + 8, columns 8c..8c+7.
using SlabPiece = float[8];

// Stochastic rounding of four numbers to a format that keeps all but the kCut lowest bits: adding the bits that a word
// leaves of a step and cutting off rounds up iff the word is below the fraction. That holds between the format's smallest
// normal number and infinity; four numbers that are not all there (false) take the long way.
template <int kCut, uint32_t kSmallestNormal>
__device__ __forceinline__ bool addDraws(uint32_t (&sum)[4], const float* x, const PhiloxWords& draw) {
  bool ordinary = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = __float_as_uint(x[i]);
    ordinary &= (bits & 0x7fffffffu) - kSmallestNormal < kInfinityBits - kSmallestNormal;
    sum[i] = bits + ((1u << kCut) - 1 - (draw.word[i] >> (32 - kCut)));
  }
  return ordinary;
}

// Codecs: decode() takes a slab out of shared memory. An Encoder writes one to global memory, piece after piece, to
// nearest or stochastically (`random`); what a piece needs of the whole row or head is given to it.
template <StateFormat kFormat>
struct SlabCodec;

// Rows share banks, so two lanes in eight collide; swapping the halves of odd rows would cost more than that.
template <>
struct SlabCodec<StateFormat::kFloat32> {
  static __device__ __forceinline__ float4* place(char* at, int b, int half, int lane) {
    return reinterpret_cast<float4*>(at + (lane / 4 + 8 * half) * 512 + b * 128 + lane % 4 * 32);
  }

  static __device__ __forceinline__ void decode(Slab& s, const char* at, const char*, int lane) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4* from = place(const_cast<char*>(at), b, half, lane);
        const float4 low = from[0], high = from[1];
        const float row[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) s[b][half][i] = row[i];
      }
    }
  }

  struct Encoder {
    char* at;
    int lane;
    __device__ __forceinline__ Encoder(const ParkedSlab&, char* data, char*, float, int l) : at(data), lane(l) {}

    // Exact, so nothing is drawn.
    __device__ __forceinline__ void stochastic(const SlabPiece& x, int b, int half, const StateRandom&, int) const {
      float4* to = place(at, b, half, lane);
      to[0] = make_float4(x[0], x[1], x[2], x[3]);
      to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  };
};

template <>
struct SlabCodec<StateFormat::kFloat16> {
  static __device__ __forceinline__ uint4* place(char* at, int b, int half, int lane) {
    return reinterpret_cast<uint4*>(at + (lane / 4 + 8 * half) * 256 + b * 64 + lane % 4 * 16);
  }

  static __device__ __forceinline__ void decode(Slab& s, const char* at, const char*, int lane) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 piece = *place(const_cast<char*>(at), b, half, lane);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
          s[b][half][2 * i] = both.x;
          s[b][half][2 * i + 1] = both.y;
        }
      }
    }
  }

  struct Encoder {
    char* at;
    int lane;
    __device__ __forceinline__ Encoder(const ParkedSlab&, char* data, char*, float, int l) : at(data), lane(l) {}

    static __device__ __forceinline__ uint2 quad(const float* x, const PhiloxWords& draw) {
      constexpr uint32_t kSmallestNormal = 0x38800000u;
      uint32_t sum[4];
      const bool ordinary = addDraws<13, kSmallestNormal>(sum, x, draw);
      if (ordinary) return make_uint2(truncatedHalves(sum[0], sum[1]), truncatedHalves(sum[2], sum[3]));
      return make_uint2(halfStochastic(x[0], draw.word[0]) | halfStochastic(x[1], draw.word[1]) << 16,
                        halfStochastic(x[2], draw.word[2]) | halfStochastic(x[3], draw.word[3]) << 16);
    }

    // firstRow: of the slab, within the head.
    __device__ __forceinline__ void stochastic(const SlabPiece& x, int b, int half, const StateRandom& random,
                                               int firstRow) const {
      const uint32_t first = firstQuad(firstRow + lane / 4 + 8 * half, b, lane);
      const uint2 low = quad(x, random.words(first)), high = quad(x + 4, random.words(first + 1));
      *place(at, b, half, lane) = make_uint4(low.x, low.y, high.x, high.y);
    }

    __device__ __forceinline__ void nearest(const SlabPiece& x, int b, int half) const {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;"
            : "=r"(words[i])
            : "f"(saturated(x[2 * i + 1])), "f"(saturated(x[2 * i])));
      }
      *place(at, b, half, lane) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    // Within float16's finite range; NaN stays NaN.
    static __device__ __forceinline__ float saturated(float x) {
      return fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x;
    }
  };
};

template <>
struct SlabCodec<StateFormat::kE4m3> {
  static __device__ __forceinline__ void decode(Slab& s, const char* at, const char* scales, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      const float scale = reinterpret_cast<const float*>(scales)[row];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint2 piece = *reinterpret_cast<const uint2*>(at + row * 128 + b * 32 + lane % 4 * 8);
        const uint32_t pairs[4] = {piece.x, piece.x >> 16, piece.y, piece.y >> 16};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t halves = halvesOfE4m3(pairs[i]);
          const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves));
          s[b][half][2 * i] = both.x * scale;
          s[b][half][2 * i + 1] = both.y * scale;
        }
      }
    }
  }

  struct Encoder {
    char* at;
    int lane;
    float scale[2];  // of rows g and g + 8

    __device__ __forceinline__ Encoder(const ParkedSlab& s, char* data, char* scales, float, int l)
        : at(data), lane(l) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = largestOfRow(s, half);
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        scale[half] = e4m3Scale(largest);
        if (lane % 4 == 0) reinterpret_cast<float*>(scales)[lane / 4 + 8 * half] = scale[half];
      }
    }

    static __device__ __forceinline__ uint32_t nearestQuad(const float (&x)[4]) {
      return e4m3NearestPair(x[0], x[1]) | e4m3NearestPair(x[2], x[3]) << 16;
    }

    // What is left after cutting off is exact.
    static __device__ __forceinline__ uint32_t stochasticQuad(const float (&x)[4], const PhiloxWords& draw) {
      constexpr uint32_t kSmallestNormal = 0x3c800000u;
      uint32_t sum[4];
      const bool ordinary = addDraws<20, kSmallestNormal>(sum, x, draw);
      float cut[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) cut[i] = __uint_as_float(sum[i] & 0xfff00000u);
      if (ordinary) return nearestQuad(cut);
      return e4m3Stochastic(x[0], draw.word[0]) | e4m3Stochastic(x[1], draw.word[1]) << 8 |
             e4m3Stochastic(x[2], draw.word[2]) << 16 | e4m3Stochastic(x[3], draw.word[3]) << 24;
    }

    // round(quotients, quad): four codes.
    template <class Round>
    __device__ __forceinline__ void encode(const SlabPiece& x, int b, int half, Round round) const {
      const Quotient quotient(half == 0 ? scale[0] : scale[1]);
      uint32_t words[2];
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = quotientOf(quotient, x[4 * quad + i]);
        words[quad] = round(y, quad);
      }
      *reinterpret_cast<uint2*>(at + (lane / 4 + 8 * half) * 128 + b * 32 + lane % 4 * 8) =
          make_uint2(words[0], words[1]);
    }

    __device__ __forceinline__ void stochastic(const SlabPiece& x, int b, int half, const StateRandom& random,
                                               int firstRow) const {
      const uint32_t first = firstQuad(firstRow + lane / 4 + 8 * half, b, lane);
      encode(x, b, half,
             [&](const float (&y)[4], int quad) { return stochasticQuad(y, random.words(first + quad)); });
    }

    __device__ __forceinline__ void nearest(const SlabPiece& x, int b, int half) const {
      encode(x, b, half, [](const float (&y)[4], int) { return nearestQuad(y); });
    }
  };
};

template <>
struct SlabCodec<StateFormat::kE2m1> {
  struct Encoder {
    char* at;
    char* scales;
    float headScale;  // of the whole head, which other warps hold parts of
    int lane;
    __device__ __forceinline__ Encoder(const ParkedSlab&, char* data, char* blockScales, float head, int l)
        : at(data), scales(blockScales), headScale(head), lane(l) {}

    // Codes of eight finite numbers with an ordinary scale: Quotient and e2m1Nearest, less what these cannot need.
    static __device__ __forceinline__ uint32_t ordinaryCodes(const float (&x)[8], float scale) {
      constexpr uint32_t kOne = 0x3f800000u;
      // Whole spacings are the last bits of a rounded sum, whose exponent and first bit are 299 and two a binade.
      constexpr uint32_t kStart = 299u * 0x11111111u;
      const float inverse = reciprocal(scale);
      uint32_t word = 0u - kStart, signs = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float magnitude = fabsf(x[i]);
        const float guess = magnitude * inverse;
        const float capped = fminf(fmaf(fmaf(-guess, scale, magnitude), inverse, guess), kE2m1Largest);
        const uint32_t binade = max(__float_as_uint(capped) & 0x7f800000u, kOne);
        const uint32_t sum = __float_as_uint(fmaf(__uint_as_float(binade), 6291456.0f, capped));
        word += ((sum & 7u) + (sum >> 22)) << 4 * i;
        signs |= __float_as_uint(x[i]) >> (28 - 4 * i) & 8u << 4 * i;
      }
      return word | signs;
    }

    static __device__ __forceinline__ uint32_t allCodes(const float (&x)[8], float scale) {
      const Quotient quotient(scale);
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) word |= e2m1Nearest(quotientOf(quotient, x[i])) << 4 * i;
      return word;
    }

    __device__ __forceinline__ void nearest(const SlabPiece& x, int b, int half) const {
      const int row = lane / 4 + 8 * half;
      const uint32_t bits = largestBits(x);
      float largest = largestFinite(x, bits);
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));  // two lanes share a block of 16
      const uint8_t code = nvfp4BlockScale(largest, headScale);
      const float scale = nvfp4Scale(code, headScale);
      if (lane % 2 == 0) scales[row * 8 + b * 2 + lane % 4 / 2] = static_cast<char>(code);
      const bool ordinary = bits < kInfinityBits && scale > 8.67361738e-19f && scale < 1.15292150e18f;  // 2^+-60
      *reinterpret_cast<uint32_t*>(at + row * 64 + b * 16 + lane % 4 * 4) =
          ordinary ? ordinaryCodes(x, scale) : allCodes(x, scale);
    }
  };
};

}  // namespace replayssm
