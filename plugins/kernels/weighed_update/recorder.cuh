// A team's recorder warps, which follow the heads that the producer announces: one fetches keys and records, the others
// weigh them for the consumers, in turn. So no load waits for the weights of the head before.
//
// All copies are asynchronous. Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "gdn_weights.cuh"
#include "kernels/common/warp_arrival.cuh"
#include "producer.cuh"

namespace replayssm::weighed {

template <class Traits>
using Weigher = GdnWeigher<Traits>;

// Where a recorder stands.
template <class Traits>
struct RecorderBase {
  const UpdateParams& p;
  const SharedLayout& layout;
  const Barriers barriers;
  char* const shared;  // the team's share
  const int lane;
  RingCursor headAt, slotAt, keysAt;

  __device__ ItemHeader nextHead() const {
    barrierWait(barriers.announced(headAt.index), headAt.parity);
    return *reinterpret_cast<const ItemHeader*>(shared + layout.headPlace(headAt.index));
  }
  __device__ char* slot() const { return shared + layout.slotStart + slotAt.index * layout.slotBytes; }
  __device__ char* keys() const { return shared + layout.keyPlace(keysAt.index); }
  __device__ void advance(const ItemHeader& head) {
    headAt.advance(kHeads);
    slotAt.advance(layout.slots);
    if (usesKeys(head, kLast)) keysAt.advance(layout.keyBuffers);
  }
};

template <class Traits>
struct Fetcher : RecorderBase<Traits> {
  using Base = RecorderBase<Traits>;
  using Base::barriers;
  using Base::keysAt;
  using Base::lane;
  using Base::layout;
  using Base::p;
  using Base::slotAt;

  __device__ RecordLoader<Traits> loader() const { return {p, layout, lane, 32}; }
  static __device__ RowInfo rowInfo(const ItemHeader& head) {
    return {head.slot, head.tokens(), head.origin(), head.pending()};
  }

  __device__ void loadKeys(const ItemHeader& head) {
    const RowInfo info = rowInfo(head);
    const int group = head.head() / p.headsPerGroup;
    const uint32_t target = sharedAddress(this->keys()), full = barriers.keysFull(keysAt.index);
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
    const uint32_t target = sharedAddress(this->slot()), landed = barriers.landed(slotAt.index);
    if (lane == 0) loader().bulkRows(info, loader().ringValues(info, head.head()), Traits::kValuePitch, target, landed);
    loader().template values<Traits::kHeadDim>(info, head.row, head.head(), info.pending, records, 0, target);
    loader().numbers(info, head.row, head.head(), 0, records, target);
    loader().rates(info, head.row, head.head(), target);
    loadsArrive(landed);
  }

  __device__ void run() {
#pragma unroll 1
    while (true) {
      const ItemHeader head = this->nextHead();
      if (head.has(kEnd)) break;
      if (usesKeys(head, kFirst)) loadKeys(head);
      barrierWait(barriers.released(slotAt.index), slotAt.parity ^ 1);
      if (head.has(kZero)) {
        barrierArrive(barriers.landed(slotAt.index));
      } else {
        loadRecords(head);
      }
      this->advance(head);
    }
    loadsDrain();
  }
};

// Each weighs every kWeighers-th head, the products of a chunk's keys with its first one.
//
// HAZARD: it waits for the keys of every chunk and for a slot's release, so that their last uses are over.
template <class Traits>
struct WeighingLoop : RecorderBase<Traits> {
  using Base = RecorderBase<Traits>;
  using Base::barriers;
  using Base::keysAt;
  using Base::lane;
  using Base::layout;
  using Base::p;
  using Base::slotAt;

  // Consumers hand a chunk's keys back item by item; for what it has fewer than others the first weigher does.
  __device__ void handBackKeys(int index, int heads) const {
    const int missing = index == 0 ? (mostHeads(p.deal) - heads) * Traits::kParts * Traits::kWarps : 0;
    if (kEveryLaneArrives || lane == 0) barrierArriveTimes(barriers.keysEmpty(keysAt.index), 1 + missing);
  }

  __device__ void run(int index) {
    const Weigher<Traits> weigher{{p, layout, 0, lane}};
    int turn = index;  // how many heads until this warp's next one
    int heads = 0;     // of the chunk, so far
#pragma unroll 1
    while (true) {
      const ItemHeader head = this->nextHead();
      if (head.has(kEnd)) break;
      const bool own = turn == 0, first = usesKeys(head, kFirst);
      turn = own ? Traits::kWeighers - 1 : turn - 1;
      heads = first ? 1 : heads + 1;
      if (first) barrierWait(barriers.keysFull(keysAt.index), keysAt.parity);
      if (own) {
        if (first) {
          weigher.multiply(head, this->keys());
          if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.multiplied(keysAt.index));
        }
        barrierWait(barriers.released(slotAt.index), slotAt.parity ^ 1);
        barrierWait(barriers.landed(slotAt.index), slotAt.parity);
        if (!head.has(kZero)) {
          barrierWait(barriers.multiplied(keysAt.index), keysAt.parity);
          weigher.weigh(head, this->slot(), this->keys());
        }
        __syncwarp();
        if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.weighed(slotAt.index));
        if (usesKeys(head, kAppendKeys)) {
          weigher.appendKeys(head, this->keys());
          __syncwarp();
        }
      }
      if (usesKeys(head, kLast)) handBackKeys(index, heads);
      this->advance(head);
    }
  }
};

}  // namespace replayssm::weighed
