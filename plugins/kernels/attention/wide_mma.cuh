// Matrix instructions of a warpgroup (sm_90a) on tiles of panels (stream.cuh): scores of 64 query rows and 64 keys, both in
// shared memory; sums of 16 of the keys' values, whose weights are in registers. A lane keeps of a sum what it keeps of
// one of mma.m16n8k16 (common/mma.cuh), 8 columns by 8 columns; a warp has 16 of the rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "stream.cuh"

namespace replayssm {

constexpr int kWideKeys = 64, kWideRows = 64;
constexpr int kPanelBytes = 64 * kPanelRowBytes;  // of a tile of 64 rows
constexpr uint64_t kSwizzled = uint64_t{1} << 62, kEightRows = uint64_t{8 * kPanelRowBytes >> 4} << 32;

// Sixteen channels of every row of a tile, their first panel and row at `at`.
__device__ __forceinline__ uint64_t rowsOperand(uint32_t at) {
  return kSwizzled | kEightRows | uint64_t{1} << 16 | (at & 0x3ffff) >> 4;
}
// All channels of sixteen rows of a tile, the first of them at `at`; turned: rows are what is summed over.
__device__ __forceinline__ uint64_t turnedOperand(uint32_t at) {
  return kSwizzled | kEightRows | uint64_t{kPanelBytes >> 4} << 16 | (at & 0x3ffff) >> 4;
}

// Orders registers and shared memory that the instructions read behind what wrote them.
__device__ __forceinline__ void warpgroupFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroupCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kOpen committed groups are not complete.
template <int kOpen>
__device__ __forceinline__ void warpgroupWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}
// Nothing that reads the sums comes before this.
template <int kTiles>
__device__ __forceinline__ void holdSums(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// clang-format off
#define RSSM_SUM(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define RSSM_SUMS_32 \
  RSSM_SUM(0), RSSM_SUM(1), RSSM_SUM(2), RSSM_SUM(3), RSSM_SUM(4), RSSM_SUM(5), RSSM_SUM(6), RSSM_SUM(7)
#define RSSM_SUMS_64 \
  RSSM_SUMS_32, \
  RSSM_SUM(8), RSSM_SUM(9), RSSM_SUM(10), RSSM_SUM(11), RSSM_SUM(12), RSSM_SUM(13), RSSM_SUM(14), RSSM_SUM(15)
#define RSSM_SUMS_128 \
  RSSM_SUMS_64, \
  RSSM_SUM(16), RSSM_SUM(17), RSSM_SUM(18), RSSM_SUM(19), RSSM_SUM(20), RSSM_SUM(21), RSSM_SUM(22), \
  RSSM_SUM(23), RSSM_SUM(24), RSSM_SUM(25), RSSM_SUM(26), RSSM_SUM(27), RSSM_SUM(28), RSSM_SUM(29), \
  RSSM_SUM(30), RSSM_SUM(31)
#define RSSM_PLACES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define RSSM_PLACES_64 \
  RSSM_PLACES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RSSM_PLACES_128 \
  RSSM_PLACES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
#define RSSM_SCORES(type) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
               RSSM_PLACES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}" \
               : RSSM_SUMS_32 : "l"(queries), "l"(keys), "r"(static_cast<int>(adds)))
#define RSSM_VALUES_128(type) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
               RSSM_PLACES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
               : RSSM_SUMS_64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values))
#define RSSM_VALUES_256(type) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
               RSSM_PLACES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;" \
               : RSSM_SUMS_128 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values))
// clang-format on

// d = queries keys^T, or d += ...: over 16 channels. Asynchronous: d belongs to the instruction until its group is complete.
template <class Act>
__device__ __forceinline__ void scoresMma(float (&d)[8][4], uint64_t queries, uint64_t keys, bool adds) {
  if constexpr (std::is_same_v<Act, __half>) {
    RSSM_SCORES("f16");
  } else {
    RSSM_SCORES("bf16");
  }
}

// d += a values: over 16 keys; a, their weights, belongs to the instruction too.
template <class Act>
__device__ __forceinline__ void valuesMma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t values) {
  if constexpr (std::is_same_v<Act, __half>) {
    RSSM_VALUES_128("f16");
  } else {
    RSSM_VALUES_128("bf16");
  }
}
template <class Act>
__device__ __forceinline__ void valuesMma(float (&d)[32][4], const uint32_t (&a)[4], uint64_t values) {
  if constexpr (std::is_same_v<Act, __half>) {
    RSSM_VALUES_256("f16");
  } else {
    RSSM_VALUES_256("bf16");
  }
}

#undef RSSM_SUM
#undef RSSM_SUMS_32
#undef RSSM_SUMS_64
#undef RSSM_SUMS_128
#undef RSSM_PLACES_32
#undef RSSM_PLACES_64
#undef RSSM_PLACES_128
#undef RSSM_SCORES
#undef RSSM_VALUES_128
#undef RSSM_VALUES_256

}  // namespace replayssm
