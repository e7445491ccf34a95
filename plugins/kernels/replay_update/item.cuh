// What the streaming kernels of all families mean by an item, and the header that travels with it.
//
// A CTA holds independent teams, so that one team's latency hides behind the others. A team's producer warp streams items
// (a head's state, or a part of it) through a ring of stages; each consumer warp owns kSlab rows of them. Keys and queries
// are shared by the heads of a group, so they travel once per CHUNK: the heads of one group and row that one team takes.
#pragma once

#include <cstdint>

namespace replayssm {

constexpr int kSlab = 16;   // state rows of a warp: the height of a matrix instruction
constexpr int kBlock = 32;  // state columns a warp handles at a time: 8 contiguous ones a lane

enum class Family { mamba2, gdn };  // spelt as in supported.inc

constexpr __host__ __device__ int32_t roundUp(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }

enum HeaderFlags : uint32_t {
  kEnd = 1,          // no more items
  kZero = 2,         // padding row or no tokens: write zeros, nothing was loaded
  kFirst = 4,        // first item of a chunk: wait for the keys
  kLast = 8,         // last item of a chunk: release the keys
  kAppendKeys = 16,  // this item writes the group's new keys into the ring
  kFamilyFlag = 32   // what it means is the family's affair
};

// What a consumer needs to know of an item, in one 16-byte word; written by the producer.
template <int kHeadBits>
struct ItemHeaderOf {
  int32_t row, slot;  // batch row, state slot
  uint32_t place;     // head (kHeadBits bits), ordinal modulo what the other bits hold
  uint32_t counts;    // flags (8 bits), num_tokens, h, ring row of the oldest record (8 bits each)

  static __device__ ItemHeaderOf make(uint32_t flags, int row, int slot, int head, int ordinal, int origin, int pending,
                                      int tokens) {
    return {row, slot, static_cast<uint32_t>(head) | static_cast<uint32_t>(ordinal) << kHeadBits,
            flags | static_cast<uint32_t>(tokens) << 8 | static_cast<uint32_t>(pending) << 16 |
                static_cast<uint32_t>(origin) << 24};
  }
  __device__ void drop(HeaderFlags flag) { counts &= ~static_cast<uint32_t>(flag); }
  __device__ bool has(HeaderFlags flag) const { return (counts & flag) != 0; }
  __device__ int head() const { return static_cast<int>(place & ((1u << kHeadBits) - 1)); }
  __device__ int ordinal() const { return static_cast<int>(place >> kHeadBits); }
  __device__ int tokens() const { return static_cast<int>(counts >> 8 & 255u); }
  __device__ int pending() const { return static_cast<int>(counts >> 16 & 255u); }
  __device__ int origin() const { return static_cast<int>(counts >> 24); }
};

}  // namespace replayssm
