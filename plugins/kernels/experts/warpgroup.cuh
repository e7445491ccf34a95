// Matrix instructions of a warpgroup (sm_90a): four warps with 16 rows each in registers times tokens in shared memory,
// read once for all four. The sums lie as those of mma.m16n8k16, tile of 8 tokens by tile.
//
// The tokens' operand: 8 tokens by 8 columns of 16 bits make a core of 128 contiguous bytes, a token's 16 bytes after
// another's; cores of the same tokens follow each other along the columns.
#pragma once

#include <cstdint>

namespace replayssm {

constexpr int kCoreBytes = 128;

// Orders the registers of later instructions behind what wrote them.
__device__ __forceinline__ void warpgroupFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroupCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kOpen committed groups are not complete.
template <int kOpen>
__device__ __forceinline__ void warpgroupWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}

#define RSSM_SUMS(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define RSSM_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(1)

// d += a tokens; asynchronous: d and a belong to the instruction until its group is complete.
__device__ __forceinline__ void warpgroupMma(float (&d)[2][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1)
      : RSSM_OPERANDS);
}
__device__ __forceinline__ void warpgroupMma(float (&d)[4][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1), RSSM_SUMS(2), RSSM_SUMS(3)
      : RSSM_OPERANDS);
}
__device__ __forceinline__ void warpgroupMma(float (&d)[6][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1), RSSM_SUMS(2), RSSM_SUMS(3), RSSM_SUMS(4), RSSM_SUMS(5)
      : RSSM_OPERANDS);
}
__device__ __forceinline__ void warpgroupMma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1), RSSM_SUMS(2), RSSM_SUMS(3), RSSM_SUMS(4), RSSM_SUMS(5), RSSM_SUMS(6), RSSM_SUMS(7)
      : RSSM_OPERANDS);
}

__device__ __forceinline__ void warpgroupMma(float (&d)[5][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %25, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19}, "
      "{%20, %21, %22, %23}, %24, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1), RSSM_SUMS(2), RSSM_SUMS(3), RSSM_SUMS(4)
      : RSSM_OPERANDS);
}
__device__ __forceinline__ void warpgroupMma(float (&d)[7][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %33, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n56k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27}, "
      "{%28, %29, %30, %31}, %32, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1), RSSM_SUMS(2), RSSM_SUMS(3), RSSM_SUMS(4), RSSM_SUMS(5), RSSM_SUMS(6)
      : RSSM_OPERANDS);
}

__device__ __forceinline__ void warpgroupMma(float (&d)[3][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, p, 1, 1, 0;\n}"
      : RSSM_SUMS(0), RSSM_SUMS(1), RSSM_SUMS(2)
      : RSSM_OPERANDS);
}

#undef RSSM_SUMS
#undef RSSM_OPERANDS

}  // namespace replayssm
