// Words that travel between ranks: pushed over NVLink, marked until they have come.
//
// HAZARD: why two halves are enough. Half `turn % 2` of a row is written by a peer in its call `turn`, which follows the
// end of its call `turn - 1`; that one ended because this rank's words of `turn - 1` had come, which were sent after this
// rank's call `turn - 2` had ended, the last to take from this half and to mark it anew.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace replayssm {

constexpr uint32_t kMark = RSSM_INBOX_MARK;
constexpr uint32_t kNan = 0x7fff7fffu;            // a pair of either type
constexpr uint32_t kPollsBetweenLooks = 1u << 12;  // at the host's memory, far away

__device__ __forceinline__ uint32_t sendable(uint32_t pair) { return pair == kMark ? 0u : pair; }
__device__ __forceinline__ uint4 sendable(uint4 word) {
  return {sendable(word.x), sendable(word.y), sendable(word.z), sendable(word.w)};
}

__device__ __forceinline__ void push(uint4* at, uint4 word) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"l"(at), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

__device__ __forceinline__ uint4 look(const uint4* at) {
  uint4 word;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(at)
               : "memory");
  return word;
}

// Whether a part of the word is still to come: each 32 bits arrive at once, the four of them may not.
__device__ __forceinline__ bool isPartial(uint4 word) {
  return word.x == kMark || word.y == kMark || word.z == kMark || word.w == kMark;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Whether nobody waits any more; says so itself where the wait since `begun` is too long.
__device__ __noinline__ bool givesUp(uint32_t* gaveUp, uint64_t begun, uint64_t patience) {
  uint32_t others;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(others) : "l"(gaveUp) : "memory");
  if (others != 0) return true;
  if (nanoseconds() - begun < patience) return false;
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(gaveUp), "r"(1u) : "memory");
  return true;
}

// The word that a peer pushes there, waited for; its place is marked for the next but one call.
__device__ __forceinline__ uint4 take(uint4* at, const SumRanksParams& p) {
  uint4 word = look(at);
  if (isPartial(word)) {
    const uint64_t begun = nanoseconds();
    for (uint32_t polls = 1; isPartial(word); ++polls) {
      if (polls % kPollsBetweenLooks == 0 && givesUp(p.gaveUp, begun, p.patience)) return {kNan, kNan, kNan, kNan};
      word = look(at);
    }
  }
  *at = {kMark, kMark, kMark, kMark};
  return word;
}

}  // namespace replayssm
