// Slabs in E4M3, with a scale a row, and in E2M1, with one for each 16 columns and one for the head: see SlabCodec.
#pragma once

#include "../common/divide.cuh"
#include "../common/e2m1.cuh"
#include "slab.cuh"

namespace replayssm {

template <bool kExchanged>
struct SlabCodec<StateFormat::kE4m3, kExchanged> {
  // A piece's codes as float16 numbers.
  static __device__ __forceinline__ uint4 halves(const char* at, int b, int half, int lane) {
    const char* row = at + (lane / 4 + 8 * half) * 128;
    const uint2 piece = *reinterpret_cast<const uint2*>(row + slabColumn<kExchanged>(b, lane % 4));
    return make_uint4(halvesOfE4m3(piece.x), halvesOfE4m3(piece.x >> 16), halvesOfE4m3(piece.y),
                      halvesOfE4m3(piece.y >> 16));
  }
  static __device__ __forceinline__ float rowScale(const char* scales, int half, int lane) {
    return reinterpret_cast<const float*>(scales)[lane / 4 + 8 * half];
  }

  static __device__ __forceinline__ void decode(Slab& s, const char* at, const char* scales, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = rowScale(scales, half, lane);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        unpackHalves(s[b][half], halves(at, b, half, lane), scale);
      }
    }
  }

  struct Encoder {
    using PieceCodes = uint2;
    using Codes = PieceCodes[2];
    static constexpr bool kNearestIsStraight = true;
    char* at;
    int lane;
    float factor[2];  // of rows g and g + 8

    __device__ __forceinline__ Encoder(const SlabMaxima& maxima, char*, char* data, char* scales, float, int l)
        : at(data), lane(l) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = maxima.row[half];
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const float scale = e4m3Scale(largest);
        factor[half] = inverse(scale);
        if (lane % 4 == 0) reinterpret_cast<float*>(scales)[lane / 4 + 8 * half] = scale;
      }
    }

    __device__ __forceinline__ void finish() const {}

    static __device__ __forceinline__ uint2 nearestOctet(const SlabPiece& x) {
      return make_uint2(e4m3NearestPair(x[0], x[1]) | e4m3NearestPair(x[2], x[3]) << 16,
                        e4m3NearestPair(x[4], x[5]) | e4m3NearestPair(x[6], x[7]) << 16);
    }

    template <class Run>
    __device__ __forceinline__ void scale(SlabPiece& y, const SlabPiece& x, const Run& run) const {
      const float own = run.half == 0 ? factor[0] : factor[1];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = x[i] * own;
    }

    // What is left after cutting off is exact. Not right for numbers below the smallest normal one.
    template <class Run>
    __device__ __forceinline__ bool stochastic(PieceCodes& codes, const SlabPiece& x, const Run& run,
                                               const PhiloxWords* draws) const {
      SlabPiece y, sum;
      scale(y, x, run);
      addDraws<20>(sum, y, draws);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = __uint_as_float(__float_as_uint(sum[i]) & 0xfff00000u);
      codes = nearestOctet(sum);
      return run.bounded && leastOf(y) >= 0.015625f;
    }

    template <class Run>
    __device__ __forceinline__ void stochasticAnyway(PieceCodes& codes, const SlabPiece& x, const Run& run,
                                                     const PhiloxWords* draws) const {
      SlabPiece y;
      scale(y, x, run);
      uint32_t words[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i / 4] |= static_cast<uint32_t>(e4m3Stochastic(y[i], ~complementOf(draws, i))) << 8 * (i % 4);
      }
      codes = make_uint2(words[0], words[1]);
    }

    template <class Run>
    __device__ __forceinline__ void nearest(Codes& codes, const Run& run) const {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        SlabPiece y;
        scale(y, run.piece(piece), run);
        codes[piece] = nearestOctet(y);
      }
    }

    template <class Run>
    __device__ __forceinline__ void store(const Codes& codes, const Run& run) const {
      const bool exchanged = kExchanged && lane % 4 >= 2;
      const uint2 low = exchanged ? codes[1] : codes[0], high = exchanged ? codes[0] : codes[1];
      *reinterpret_cast<uint4*>(at + (lane / 4 + 8 * run.half) * 128 + run.block * 64 + lane % 4 * 16) =
          make_uint4(low.x, low.y, high.x, high.y);
    }
  };
};

template <bool kExchanged>
struct SlabCodec<StateFormat::kE2m1, kExchanged> {
  struct Encoder {
    struct Codes {
      uint32_t words[2];  // of both pieces
      uint32_t scale;
    };
    static constexpr bool kNearestIsStraight = false;
    char* at;
    char* scales;
    float headScale;  // of the whole head, which other warps hold parts of
    float blockFactor;
    int lane;
    static constexpr uint8_t kSmallestNormal = 0x08;  // smaller block scales are so coarse that numbers may exceed 7
    static constexpr float kSmall = 6.10351562e-05f;  // 2^-14

    __device__ __forceinline__ Encoder(const SlabMaxima&, char*, char* data, char* blockScales, float head, int l)
        : at(data), scales(blockScales), headScale(head), blockFactor(nvfp4BlockFactor(head)), lane(l) {}

    __device__ __forceinline__ void finish() const {}

    // The float32 number one below in magnitude where the first bit of the mantissa is zero: of ties, those from an
    // even code (0.25, 1.25, 2.5, 5; not 0.75, 1.75, 3.5). Zero stays.
    static __device__ __forceinline__ float towardEven(float y) {
      constexpr float kBelowOne = 0.99999994f;  // 1 - 2^-24
      uint32_t top;  // hidden from the compiler, which would make three instructions of shift, shift and addition
      asm("shl.b32 %0, %1, 9;" : "=r"(top) : "r"(__float_as_uint(y)));
      return __uint_as_float(__float_as_uint(__fmul_rz(y, kBelowOne)) + (top >> 31));
    }

    // Upper bytes of four numbers as float16, cut off.
    static __device__ __forceinline__ uint32_t upperBytes(float a, float b, float c, float d) {
      return __byte_perm(truncatedHalves(a, b), truncatedHalves(c, d), 0x7531);
    }

    // Codes of eight numbers below 7, of which 2^-14 is given: a code is then the last bits of the exponent and the
    // first of the mantissa of a float16 number, 0.5 a subnormal one, and rounding adds half of what is below and cuts
    // off. That is the last bit of an upper byte, in which sign and code have zeros between them. It takes ties up;
    // those from an even code come in as the float32 number below (towardEven).
    static __device__ __forceinline__ uint32_t codes(const SlabPiece& y) {
      const uint32_t even = upperBytes(y[0], y[2], y[4], y[6]) + 0x01010101u;
      const uint32_t odd = upperBytes(y[1], y[3], y[5], y[7]) + 0x01010101u;
      const uint32_t magnitudes = (even >> 1 & 0x0f0f0f0fu) | (odd << 3 & 0xf0f0f0f0u);
      return magnitudes | (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    }

    // Not right for ties, NaN, numbers beyond float16 and scales at the ends of the range.
    template <class Run>
    __device__ __forceinline__ bool nearest(Codes& to, const Run& run) const {
      constexpr uint32_t kLow = 0x26800000u, kHigh = 0x58800000u;  // 2^-50, 2^50: a block's is from 2^-56 to 2^59
      to.scale = e4m3Nearest(run.largest() * blockFactor);
      const float scale = __uint_as_float((to.scale << 20) + 0x3c000000u) * headScale;  // of a normal code
      const float factor = reciprocal(scale) * kSmall;
      uint32_t lower = 0xffffu;  // ties have zeros in the lower 16 bits, as few others have
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        SlabPiece y;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          y[i] = run.piece(piece)[i] * factor;
          lower = __vminu2(lower, __float_as_uint(y[i]));
        }
        to.words[piece] = codes(y);
      }
      return run.bounded && (lower & 0xffffu) != 0 && to.scale >= kSmallestNormal &&
             __float_as_uint(headScale) - kLow < kHigh - kLow;
    }

    template <class Run>
    __device__ __forceinline__ void nearestAnyway(Codes& to, const Run& run) const {
      to.scale = nvfp4BlockScale(run.largest(), blockFactor);
      const float exact = inverse(nvfp4Scale(to.scale, headScale));
      SlabPiece rest[2];
#pragma unroll
      for (int i = 0; i < 16; ++i) rest[i / 8][i % 8] = run.piece(i / 8)[i % 8];
#pragma unroll 1
      for (int piece = 0; piece < 2; ++piece) {  // in code once
        SlabPiece y;
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // a minimum takes no notice of NaN
          const float capped = fmaxf(fminf(rest[0][i] * exact, kE2m1Largest), -kE2m1Largest);
          y[i] = towardEven(capped * kSmall);
          rest[0][i] = rest[1][i];
        }
        to.words[0] = to.words[1];
        to.words[1] = codes(y);
      }
    }

    template <class Run>
    __device__ __forceinline__ void store(const Codes& codes, const Run& run) const {
      const int row = lane / 4 + 8 * run.half;
      scales[row * 8 + run.block * 4 + lane % 4] = static_cast<char>(codes.scale);
      const bool exchanged = kExchanged && lane % 4 >= 2;
      *reinterpret_cast<uint2*>(at + row * 64 + run.block * 32 + lane % 4 * 8) =
          exchanged ? make_uint2(codes.words[1], codes.words[0]) : make_uint2(codes.words[0], codes.words[1]);
    }
  };
};

}  // namespace replayssm
