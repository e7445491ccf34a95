// Slabs in float32 and float16, which have no scales: see SlabCodec.
#pragma once

#include "../common/float16.cuh"
#include "slab.cuh"

namespace replayssm {

// Rows share banks, so two lanes in eight collide; swapping the halves of odd rows would cost more than that.
template <bool kExchanged>
struct SlabCodec<StateFormat::kFloat32, kExchanged> {
  static __device__ __forceinline__ float4* place(char* at, int b, int half, int lane) {
    return reinterpret_cast<float4*>(at + (lane / 4 + 8 * half) * 512 + slabColumn<kExchanged>(b, lane % 4) * 4);
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

  static __device__ __forceinline__ float rowScale(const char*, int, int) { return 1.0f; }

  struct Encoder {
    char *stage, *at;
    int lane;
    __device__ __forceinline__ Encoder(const SlabMaxima&, char* room, char* data, char*, float, int l)
        : stage(room), at(data), lane(l) {}

    // Exact, so nothing is drawn.
    template <class Run>
    __device__ __forceinline__ void storeExactly(const Run& run) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const SlabPiece& x = run.piece(i);
        float4* to = place(stage, 2 * run.block + i, run.half, lane);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
      }
    }

    __device__ __forceinline__ void finish() const { copyRows<16 * 512>(at, stage, lane); }
  };
};

template <bool kExchanged>
struct SlabCodec<StateFormat::kFloat16, kExchanged> {
  static __device__ __forceinline__ uint4* place(char* at, int b, int half, int lane) {
    return reinterpret_cast<uint4*>(at + (lane / 4 + 8 * half) * 256 + slabColumn<kExchanged>(b, lane % 4) * 2);
  }

  // A piece as float16 numbers.
  static __device__ __forceinline__ uint4 halves(const char* at, int b, int half, int lane) {
    return *place(const_cast<char*>(at), b, half, lane);
  }
  static __device__ __forceinline__ float rowScale(const char*, int, int) { return 1.0f; }

  static __device__ __forceinline__ void decode(Slab& s, const char* at, const char*, int lane) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) unpackHalves(s[b][half], halves(at, b, half, lane), 1.0f);
    }
  }

  struct Encoder {
    using PieceCodes = uint32_t[4];
    using Codes = PieceCodes[2];
    static constexpr bool kNearestIsStraight = true;
    static constexpr uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    char *stage, *at;
    int lane;
    __device__ __forceinline__ Encoder(const SlabMaxima&, char* room, char* data, char*, float, int l)
        : stage(room), at(data), lane(l) {}

    __device__ __forceinline__ void finish() const { copyRows<16 * 256>(at, stage, lane); }

    // Any magnitude, rounded up iff the word is below the fraction. Bits are missing from the lower end of a subnormal
    // number: what the grid of 2^-24 leaves of it is made an integer. NaN takes that way and stays.
    static __device__ __forceinline__ float anyMagnitude(float x, uint32_t complement) {
      float magnitude;
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(magnitude) : "f"(fabsf(x)), "f"(65504.0f));
      const float below = __fadd_rz(magnitude, 0.5f) - 0.5f;
      const uint32_t fraction = __float2uint_rz((magnitude - below) * 7.20575940379279e16f);   // 2^56
      const float subnormal = complement > ~fraction ? below + 5.9604644775390625e-08f : below;  // 2^-24
      const float normal = __uint_as_float(__float_as_uint(magnitude) + (complement >> 19));
      return magnitude >= __uint_as_float(kSmallestNormal) ? normal : subnormal;
    }

    static __device__ __forceinline__ uint32_t anyHalves(float low, float high, uint32_t lowDraw, uint32_t highDraw) {
      return truncatedHalves(anyMagnitude(low, lowDraw), anyMagnitude(high, highDraw)) |
             (__byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632) & 0x80008000u);
    }

    // Of two pairs of float16 numbers, the lesser magnitudes.
    static __device__ __forceinline__ uint32_t leastHalves(uint32_t a, uint32_t b) {
      const __half2 least = __hmin2(__habs2(*reinterpret_cast<const __half2*>(&a)),
                                    __habs2(*reinterpret_cast<const __half2*>(&b)));
      return *reinterpret_cast<const uint32_t*>(&least);
    }
    // Of eight rounded numbers; one below the smallest normal one has come out as that one at most.
    static __device__ __forceinline__ bool noneSubnormal(const uint32_t (&halves)[4]) {
      const uint32_t least = leastHalves(leastHalves(halves[0], halves[1]), leastHalves(halves[2], halves[3]));
      return (least - 0x04010401u & 0x80008000u) == 0;
    }

    template <class Run>
    static __device__ __forceinline__ bool stochastic(PieceCodes& codes, const SlabPiece& x, const Run& run,
                                                      const PhiloxWords* draws) {
      float sum[8];
      addDraws<13>(sum, x, draws);
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = truncatedHalves(sum[2 * i], sum[2 * i + 1]);
      return run.bounded && noneSubnormal(codes);
    }

    template <class Run>
    static __device__ __forceinline__ void stochasticAnyway(PieceCodes& codes, const SlabPiece& x, const Run& run,
                                                            const PhiloxWords* draws) {
      if (__all_sync(kAllLanes, run.bounded && noneSubnormal(codes))) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // numbers that small are few and far between
        const float low = x[2 * i], high = x[2 * i + 1];
        if (!__all_sync(kAllLanes, run.bounded && fminf(fabsf(low), fabsf(high)) >= __uint_as_float(kSmallestNormal))) {
          codes[i] = anyHalves(low, high, complementOf(draws, 2 * i), complementOf(draws, 2 * i + 1));
        }
      }
    }

    template <class Run>
    __device__ __forceinline__ void nearest(Codes& codes, const Run& run) const {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const SlabPiece& x = run.piece(piece);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          asm("cvt.rn.f16x2.f32 %0, %1, %2;"
              : "=r"(codes[piece][i])
              : "f"(saturated(x[2 * i + 1])), "f"(saturated(x[2 * i])));
        }
      }
    }

    template <class Run>
    __device__ __forceinline__ void storePiece(const PieceCodes& codes, const Run& run, int piece) const {
      *place(stage, 2 * run.block + piece, run.half, lane) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    }
    template <class Run>
    __device__ __forceinline__ void store(const Codes& codes, const Run& run) const {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) storePiece(codes[piece], run, piece);
    }

    // Within float16's finite range; NaN stays NaN.
    static __device__ __forceinline__ float saturated(float x) {
      return fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x;
    }
  };
};

}  // namespace replayssm
