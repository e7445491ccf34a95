// How persistent workers share out the heads of all rows, and what each one's producer knows of its work in advance.
#pragma once

#include "row_info.cuh"

namespace replayssm {

// A position in a ring of buffers, with the parity of its current use.
struct RingCursor {
  int index = 0;
  uint32_t parity = 0;
  __device__ void advance(int size) {
    if (++index == size) {
      index = 0;
      parity ^= 1;
    }
  }
};

// A run of heads of one row and group: what shares one load of keys.
struct Chunk {
  int row, head, count;
  bool leads;  // begins with its group's first head
};

// Runs dealt in turn first, so that rows that flush are spread. Multiprocessors do not all get the same bandwidth, so the
// rest goes to whoever is ready: a worker's first piece is its own number, later ones are drawn from a counter in the
// workspace.
struct ChunkList {
  const UpdateParams& p;
  const int worker, workers;
  const RowOrder order;

  // Heads of all rows, in their order.
  struct Run {
    int first, count;
  };

  __device__ bool draws() const { return p.deal.pieces > workers; }

  // How many chunks of a worker are known without drawing, as far as there is work.
  __device__ int known() const { return p.deal.rounds + 1; }

  // A ticket for a later piece, in lane 0; asked for long before it is used, since its way to the memory is long.
  __device__ int draw(int lane) const {
    return draws() && lane == 0 ? workers + static_cast<int>(atomicAdd(p.tickets, 1u)) : 0;
  }

  // A run for each lane, all lanes together.
  __device__ Chunk chunk(const Run& run) const {
    const int place = run.first / p.heads;
    return {order.row(p, place), run.first - place * p.heads, run.count, run.first % p.headsPerGroup == 0};
  }
  __device__ Run piece(int number) const {
    const int large = min(number, p.deal.large);
    const int first = p.deal.base + large * p.deal.pieceHeads + number - large;
    return {first, number < p.deal.large ? p.deal.pieceHeads : 1};
  }

  // The index-th chunk, one of the known ones; count = 0 where there is no work left.
  __device__ Chunk ofRound(int index) const {
    Run run{0, 0};
    if (index < p.deal.rounds) {
      run = {(index * workers + worker) * p.deal.roundHeads, p.deal.roundHeads};
    } else if (index < known() && worker < p.deal.pieces) {
      run = piece(worker);
    }
    return chunk(run);
  }

  // The index-th chunk of this worker; count = 0 behind the end. One behind the known ones uses up a ticket.
  __device__ Chunk at(int index, int ticket) const {
    if (index < known()) return ofRound(index);
    if (!draws()) return {0, 0, 0, false};
    const int number = __shfl_sync(0xffffffffu, ticket, 0);
    return number < p.deal.pieces ? chunk(piece(number)) : Chunk{0, 0, 0, false};
  }

  // The last worker to finish leaves the counters at zero for the next launch.
  __device__ void finish(int lane) const {
    if (lane != 0 || !draws()) return;
    __threadfence();
    if (atomicAdd(p.tickets + 1, 1u) == static_cast<unsigned>(workers) - 1) {
      p.tickets[0] = 0;
      p.tickets[1] = 0;
    }
  }
};

// The heads of a worker in order. Where its first 32 chunks stand is looked up at once, a chunk a lane, before anything
// else burdens the memory; of later chunks slots are read two ahead and cursors one, so that neither latency shows.
struct HeadWalk {
  const ChunkList list;
  const UpdateParams& p;
  const int lane, early;  // how many chunks are looked up at once
  RowInfo mine;           // of chunk `lane`, cursors not clamped yet: that would wait for them
  Chunk chunk, next{0, 0, 0, false}, later{0, 0, 0, false};
  RowInfo info, nextInfo{-1, 0, 0, 0}, laterInfo{-1, 0, 0, 0};
  int index = 0, done = 0;  // chunks begun before this one, heads of it that are passed
  int ticket = 0;
  bool fresh = true;  // whether only the first chunk is known

  // `beside(chunk, info)` is called with the first chunk, its slot and number of tokens, while the cursors are on their way.
  template <class Beside>
  __device__ HeadWalk(const UpdateParams& params, int worker, int workers, int l, const Beside& beside)
      : HeadWalk(params, worker, workers, l, beside, RowBatch{}) {}
  template <class Beside>
  __device__ HeadWalk(const UpdateParams& params, int worker, int workers, int l, const Beside& beside, RowBatch&& rows)
      : list{params, worker, workers, RowOrder(params, l, rows)}, p(params), lane(l), early(min(list.known(), 32)) {
    const Chunk own = list.ofRound(lane);
    const int row = own.count > 0 ? own.row : -1;
    chunk = {__shfl_sync(0xffffffffu, own.row, 0), __shfl_sync(0xffffffffu, own.head, 0),
             __shfl_sync(0xffffffffu, own.count, 0), __shfl_sync(0xffffffffu, static_cast<int>(own.leads), 0) != 0};
    if (RowOrder::serves(p) && p.rows <= RowBatch::kRows) {
      mine = rows.at(row);
    } else {
      mine = fetchRow(p, row);
      if (mine.slot >= 0) {
        mine.origin = __ldcg(p.origin + mine.slot);
        mine.pending = __ldcg(p.pending + mine.slot);
      }
    }
    beside(chunk, RowInfo{__shfl_sync(0xffffffffu, mine.slot, 0), __shfl_sync(0xffffffffu, mine.tokens, 0), 0, 0});
    info = lookedUp(0);
  }
  __device__ HeadWalk(const UpdateParams& params, int worker, int workers, int l)
      : HeadWalk(params, worker, workers, l, [](const Chunk&, const RowInfo&) {}) {}

  __device__ bool ended() const { return chunk.count == 0; }
  __device__ bool zero() const { return info.idle(); }
  __device__ bool first() const { return done == 0; }
  __device__ bool last() const { return done + 1 == chunk.count; }
  __device__ int head() const { return chunk.head + done; }

  __device__ RowInfo lookedUp(int at) const {
    RowInfo found{__shfl_sync(0xffffffffu, mine.slot, at), __shfl_sync(0xffffffffu, mine.tokens, at),
                  __shfl_sync(0xffffffffu, mine.origin, at), __shfl_sync(0xffffffffu, mine.pending, at)};
    found.origin = min(max(found.origin, 0), p.ringRows - 1);
    found.pending = min(max(found.pending, 0), p.window);
    return found;
  }

  __device__ void fetchLater(int at) {
    later = list.at(at, ticket);
    if (at >= list.known()) ticket = list.draw(lane);
    laterInfo = at < early ? lookedUp(at) : fetchRow(p, later.count > 0 ? later.row : -1);
  }

  __device__ void fetchNextCursors() {
    if (index + 1 >= early) fetchCursors(p, nextInfo);
  }

  // The chunks behind the first one; called once, when the first one's copies are on their way.
  __device__ void lookAhead() {
    fresh = false;
    ticket = list.draw(lane);
    fetchLater(1);
    next = later;
    nextInfo = laterInfo;
    if (next.count > 0) fetchLater(2);
    fetchNextCursors();
  }

  __device__ void advance() {
    if (++done < chunk.count) return;
    done = 0;
    ++index;
    chunk = next;
    info = nextInfo;
    next = later;
    nextInfo = laterInfo;
    if (next.count > 0) fetchLater(index + 2);
    fetchNextCursors();
  }
};

}  // namespace replayssm
