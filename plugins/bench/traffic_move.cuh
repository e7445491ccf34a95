// The parts of a worker that moves an update's bytes: which heads it takes, what it loads and stores for each.
#pragma once

#include "bench/traffic.h"
#include "kernels/common/mbarrier.cuh"
#include "kernels/common/store_again.cuh"

namespace traffic {

using namespace replayssm;

constexpr int kLanes = 32, kMostStages = 16;

struct Item {
  int row, head, slot, origin;
};

// Of a worker's shared memory: stages, then barriers, items, and a place for numbers that nobody reads.
struct Stages {
  int count, bytes, ringValue, value, ringKey, key, query;

  static __host__ __device__ Stages of(const Traffic& t, int room) {
    Stages s{};
    s.ringValue = t.stateBytes;
    s.value = s.ringValue + t.window * t.valueBytes;
    s.ringKey = s.value + t.tokens * t.valueBytes;
    s.key = s.ringKey + t.window * t.keyBytes;
    s.query = s.key + t.tokens * t.keyBytes;
    s.bytes = (s.query + t.tokens * t.keyBytes + 127) / 128 * 128;
    const int most = (room - kControlBytes) / s.bytes;
    s.count = most < kMostStages ? most : kMostStages;
    return s;
  }
  static constexpr int kNumbers = kMostStages * (8 + static_cast<int>(sizeof(Item))), kControlBytes = kNumbers + 512;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // bulk copies

constexpr uint32_t kAll = 0xffffffffu;

// What an update writes leaves the L2 last: a store that finds its line there is merged with it.
__device__ __forceinline__ void bulkStoreAgain(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(target), "r"(source),
               "r"(bytes), "l"(againPolicy())
               : "memory");
}

// The heads of a worker. Runs are drawn from a counter two ahead, and looked up one ahead, so that neither is waited for.
struct Walk {
  const Traffic& t;
  const int runHeads, lane, runs;
  Item item{};
  int left = 0, nextRun;
  TrafficRow nextRow{};
  unsigned ticket;

  __device__ Walk(const Traffic& traffic, int heads, int l)
      : t(traffic), runHeads(heads), lane(l), runs(traffic.rows * traffic.heads / heads), nextRun(blockIdx.x) {
    lookUp();
    ticket = draw();
    next();
  }
  __device__ unsigned draw() const { return lane == 0 ? gridDim.x + atomicAdd(t.tickets, 1u) : 0u; }
  __device__ void lookUp() {
    if (nextRun < runs) nextRow = t.row[nextRun * runHeads / t.heads];
  }
  __device__ void next() {
    const int place = nextRun * runHeads;
    left = nextRun < runs ? runHeads : 0;
    item = {place / t.heads, place % t.heads, nextRow.slot, nextRow.origin};
    if (left == 0) return;
    nextRun = static_cast<int>(__shfl_sync(kAll, ticket, 0));
    lookUp();
    ticket = draw();
  }
  __device__ bool ended() const { return left == 0; }
  __device__ bool first() const { return left == runHeads; }
  __device__ void advance() {
    ++item.head;
    if (--left == 0) next();
  }
  // The last worker leaves the counters at zero.
  __device__ void finish() const {
    if (lane != 0) return;
    __threadfence();
    if (atomicAdd(t.tickets + 1, 1u) == gridDim.x - 1) t.tickets[0] = t.tickets[1] = 0;
  }
};

struct Mover {
  const Traffic& t;
  const Stages stages;
  char* const shared;
  const uint32_t base, control;
  const int lane;

  __device__ uint32_t stage(int i) const { return base + i * stages.bytes; }
  __device__ uint32_t full(int i) const { return control + 8 * i; }
  __device__ Item* item(int i) const {
    return reinterpret_cast<Item*>(shared + stages.count * stages.bytes + 8 * kMostStages) + i;
  }
  __device__ bool flushes() const { return t.pending + t.tokens > t.window; }
  __device__ char* state(const Item& at) const {
    return t.state + (static_cast<int64_t>(at.slot) * t.heads + at.head) * t.stateBytes;
  }
  __device__ char* ring(char* from, const Item& at, int units, int unit, int bytes) const {
    return from + (static_cast<int64_t>(at.slot) * units + unit) * t.ringRows * bytes;
  }
  __device__ float* numbers(const Item& at) const {
    return t.ringNumber + (static_cast<int64_t>(at.slot) * t.heads + at.head) * t.ringRows;
  }
  __device__ int64_t token(const Item& at, int index, int units, int unit) const {
    return (static_cast<int64_t>(at.row) * t.tokens + index) * units + unit;
  }

  // `rows` of a ring from `first` on are in two pieces where they pass its end: the lane's piece, if it has one.
  template <class Move>
  __device__ void pieces(int first, int rows, int lanes, const Move& move) const {
    first = first < t.ringRows ? first : first - t.ringRows;
    const int straight = min(rows, t.ringRows - first);
    if (lane == lanes && straight > 0) move(first, 0, straight);
    if (lane == lanes + 1 && rows > straight) move(0, straight, rows - straight);
  }

  __device__ void load(int i, const Walk& walk) const {
    const Item at = walk.item;
    const int group = at.head / (t.heads / t.groups), h = t.pending;
    if (lane == 0) {
      *item(i) = at;
      const int keys = walk.first() ? (h + 2 * t.tokens) * t.keyBytes : 0;
      barrierArriveExpect(full(i), t.stateBytes + (h + t.tokens) * t.valueBytes + keys);
      if (flushes()) {
        bulkLoadAgain(stage(i), state(at), t.stateBytes, full(i));
      } else {
        bulkLoadOnce(stage(i), state(at), t.stateBytes, full(i));
      }
    }
    __syncwarp();
    pieces(at.origin, h, 1, [&](int row, int done, int rows) {
      bulkLoadOnce(stage(i) + stages.ringValue + done * t.valueBytes,
                   ring(t.ringValue, at, t.heads, at.head, t.valueBytes) + row * t.valueBytes, rows * t.valueBytes, full(i));
    });
    if (lane < t.tokens) {
      bulkLoad(stage(i) + stages.value + lane * t.valueBytes, t.value + token(at, lane, t.heads, at.head) * t.valueBytes,
               t.valueBytes, full(i));
    }
    if (walk.first()) {
      pieces(at.origin, h, 3, [&](int row, int done, int rows) {
        bulkLoad(stage(i) + stages.ringKey + done * t.keyBytes,
                 ring(t.ringKey, at, t.groups, group, t.keyBytes) + row * t.keyBytes, rows * t.keyBytes, full(i));
      });
      if (lane < t.tokens) {
        const int64_t from = token(at, lane, t.groups, group) * t.keyBytes;
        bulkLoad(stage(i) + stages.key + lane * t.keyBytes, t.key + from, t.keyBytes, full(i));
        bulkLoad(stage(i) + stages.query + lane * t.keyBytes, t.query + from, t.keyBytes, full(i));
      }
    }
    const uint32_t unread = control + Stages::kNumbers + 4 * lane;
    if (lane < h) wordLoad(unread, numbers(at) + (at.origin + lane) % t.ringRows);
    if (lane < t.tokens) {
      wordLoad(unread + 128, t.number + token(at, lane, t.heads, at.head));
      if (t.secondNumber != nullptr) wordLoad(unread + 256, t.secondNumber + token(at, lane, t.heads, at.head));
    }
  }

  __device__ void store(int i) const {
    const Item at = *item(i);
    const int perGroup = t.heads / t.groups, end = at.origin + t.pending;
    if (lane < t.tokens) {
      bulkStoreAgain(t.out + token(at, lane, t.heads, at.head) * t.valueBytes, stage(i) + stages.value + lane * t.valueBytes,
                     t.valueBytes);
      numbers(at)[(end + lane) % t.ringRows] = 0.01f;
    }
    pieces(end % t.ringRows, t.tokens, 0, [&](int row, int done, int rows) {
      bulkStore(ring(t.ringValue, at, t.heads, at.head, t.valueBytes) + row * t.valueBytes,
                stage(i) + stages.value + done * t.valueBytes, rows * t.valueBytes);
    });
    if (at.head % perGroup == 0) {  // the first of its run, whose stage has keys
      pieces(end % t.ringRows, t.tokens, 2, [&](int row, int done, int rows) {
        bulkStore(ring(t.ringKey, at, t.groups, at.head / perGroup, t.keyBytes) + row * t.keyBytes,
                  stage(i) + stages.key + done * t.keyBytes, rows * t.keyBytes);
      });
    }
    if (lane == 4 && flushes()) bulkStore(state(at), stage(i), t.stateBytes);
    bulkCommit();
  }
};

#endif

}  // namespace traffic
