// A team's recorder warps: fetch the records of the heads that the producer announces, and weigh them for the consumers.
//
// All copies are asynchronous. Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "gdn_weights.cuh"
#include "kernels/common/warp_arrival.cuh"
#include "producer.cuh"

namespace replayssm::weighed {

template <class Traits>
using Weigher = GdnWeigher<Traits>;

// Each recorder works on every kRecorders-th head. It tells of every head that it has passed, so that no slot is reused
// before all of them have seen it.
template <class Traits>
struct Recorder {
  const UpdateParams& p;
  const SharedLayout& layout;
  const Barriers barriers;
  const uint32_t sharedBase;  // of the team's share
  char* const shared;
  const int lane, index;
  RingCursor slotAt, keysAt;

  __device__ RecordLoader<Traits> loader() const { return {p, layout, lane, 32}; }
  static __device__ RowInfo rowInfo(const ItemHeader& head) {
    return {head.slot, head.tokens(), head.origin(), head.pending()};
  }

  __device__ char* slot(int index) const { return shared + layout.slotStart + index * layout.slotBytes; }

  __device__ void loadKeys(const ItemHeader& head) {
    const RowInfo info = rowInfo(head);
    const int group = head.head() / p.headsPerGroup;
    const uint32_t target = sharedBase + layout.keyPlace(keysAt.index), full = barriers.keysFull(keysAt.index);
    barrierWait(barriers.keysEmpty(keysAt.index), keysAt.parity ^ 1);
    if (lane == 0) loader().bulkRows(info, loader().ringKeys(info, group), Traits::kKeyPitch, target, full);
    loader().factors(info, group, target);
    loader().keys(info, head.row, group, info.pending, info.pending + info.tokens, target);
    loader().queries(info, head.row, group, target);
    loadsArrive(full);
  }

  __device__ void loadRecords(const ItemHeader& head) {
    const RowInfo info = rowInfo(head);
    const int records = info.pending + info.tokens;
    const uint32_t target = sharedBase + layout.slotStart + slotAt.index * layout.slotBytes, landed = barriers.landed(slotAt.index);
    if (lane == 0) loader().bulkRows(info, loader().ringValues(info, head.head()), Traits::kValuePitch, target, landed);
    loader().template values<Traits::kHeadDim>(info, head.row, head.head(), info.pending, records, 0, target);
    loader().numbers(info, head.row, head.head(), 0, records, target);
    loader().rates(info, head.row, head.head(), target);
    loadsArrive(landed);
  }

  // By the recorder of a chunk's first head, for those of all.
  __device__ void multiply(const Weigher<Traits>& weigher, const ItemHeader& head) const {
    char* const keys = shared + layout.keyPlace(keysAt.index);
    barrierWait(barriers.keysFull(keysAt.index), keysAt.parity);
    weigher.multiply(head, keys);
    if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.multiplied(keysAt.index));
    if (head.has(kAppendKeys)) weigher.appendKeys(head, keys);
  }

  __device__ void weigh(const Weigher<Traits>& weigher, const ItemHeader& head) const {
    barrierWait(barriers.landed(slotAt.index), slotAt.parity);
    weigher.weigh(head, slot(slotAt.index), shared + layout.keyPlace(keysAt.index));
  }

  __device__ void run() {
    const Weigher<Traits> weigher{{p, layout, 0, lane}};
    int turn = index;  // how many heads until this warp's next one
    while (true) {
      barrierWait(barriers.announced(slotAt.index), slotAt.parity);
      const ItemHeader head =
          *reinterpret_cast<const ItemHeader*>(slot(slotAt.index) + layout.slotHeaderOffset);
      if (head.has(kEnd)) break;
      const bool zero = head.has(kZero), own = turn == 0;
      turn = own ? Traits::kRecorders - 1 : turn - 1;
      if (own && zero) barrierArrive(barriers.landed(slotAt.index));
      if (own && !zero) {
        if (head.has(kFirst)) loadKeys(head);
        loadRecords(head);
        if (head.has(kFirst)) multiply(weigher, head);
      }
      if (head.has(kFirst) && !zero) barrierWait(barriers.multiplied(keysAt.index), keysAt.parity);
      if (own && !zero) weigh(weigher, head);
      __syncwarp();
      if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.weighed(slotAt.index));
      slotAt.advance(layout.slots);
      if (head.has(kLast) && !zero) {
        if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.keysEmpty(keysAt.index));
        keysAt.advance(layout.keyBuffers);
      }
    }
    loadsDrain();
  }
};

}  // namespace replayssm::weighed
