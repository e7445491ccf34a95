// One benchmark problem: a pool of layer state that is several times the L2, rotated over, and the calls on it.
#pragma once

#include <string>
#include <vector>

#include "bench/cases.h"
#include "bench/pool.h"
#include "replayssm/conventional.h"

struct Problem {
  static constexpr int64_t kColdBytes = int64_t{400} << 20;  // rotated state: several times the L2
  static constexpr int kLeastRotations = 4;  // launches that promise settled states may overlap two others: other slots
  static constexpr int kLeastLaunches = 12;  // of a graph, whose own start is part of the time

  Shape shape;
  bool conventional;
  int rows, tokens, window, ringRows, entries, rotations, repeats;
  int64_t slots;
  Pool pool;
  rssm_update_args args{};
  rssm_tensor states{};  // [S, E, H, P * N], conventional
  std::vector<void*> pendingByH;  // [S] int32 each, all equal to h
  std::vector<void*> slotByRotation;
  static constexpr size_t kWorkspaceBytes = 256;
  void* workspace = nullptr;

  // A float32 case of the list, with its rows or others. A conventional one has E = T + 1 states a slot (T = 1: one).
  // cold: so many slots that launches in turn find nothing of theirs in the L2.
  Problem(const Shape& s, const Case& c, int b, bool cold = true)
      : shape(s), conventional(c.operation == Operation::kConventional), rows(b), tokens(c.tokens), window(c.window),
        ringRows(c.window + c.tokens), entries(conventional && tokens > 1 ? tokens + 1 : 1) {
    int64_t rowBytes = stateElems() * 4;
    const int64_t bytes = cold ? kColdBytes : 1;
    rotations = static_cast<int>(std::max<int64_t>(kLeastRotations, (bytes + rows * rowBytes - 1) / (rows * rowBytes)));
    repeats = (kLeastLaunches + rotations - 1) / rotations;
    slots = static_cast<int64_t>(rows) * rotations;
    allocate();
  }

  bool gdn() const { return shape.kind == RSSM_GDN; }
  int launches() const { return rotations * repeats; }

  int64_t stateElems() const { return static_cast<int64_t>(shape.heads) * shape.headDim * shape.stateDim; }

  // How a launch follows the one before it: flags of both operations' calls.
  static constexpr uint32_t kPlainLaunch = 0, kProgrammatic = 1, kSettled = 1 | 2;

  void run(int rotation, int h, uint32_t flags, cudaStream_t stream) {
    if (conventional) return step(rotation, flags, stream);
    rssm_update_args call = args;
    call.flags = flags;
    call.h.data = pendingByH[static_cast<size_t>(h)];
    call.slot.data = slotByRotation[static_cast<size_t>(rotation)];
    rssm_error error{};
    ok(rssm_update(&call, workspace, kWorkspaceBytes, stream, &error), error);
  }

  // The slots of a rotation, in an order that is not the pool's where 37 allows it.
  std::vector<int32_t> slotsOf(int rotation) const {
    std::vector<int32_t> slot(static_cast<size_t>(rows));
    for (int i = 0; i < rows; ++i) {
      slot[static_cast<size_t>(i)] = rotation * rows + (rows % 37 != 0 ? (i * 37 + 11) % rows : i);
    }
    return slot;
  }
  int32_t originOf(int64_t slot) const { return static_cast<int32_t>(slot * 7 % ringRows); }

 private:
  void step(int rotation, uint32_t flags, cudaStream_t stream) {
    rssm_conventional_args call{};
    call.struct_size = sizeof(call);
    call.abi_version = RSSM_ABI_VERSION;
    call.kind = shape.kind;
    call.flags = flags;
    call.slot = args.slot;
    call.slot.data = slotByRotation[static_cast<size_t>(rotation)];
    call.num_tokens = args.num_tokens;
    call.value = args.value;
    call.k = args.k;
    call.q = args.q;
    call.dt = args.dt;
    call.a = args.a;
    call.skip = args.skip;
    call.log_decay = args.log_decay;
    call.beta = args.beta;
    call.out = args.out;
    call.state = states;
    rssm_error error{};
    ok(rssm_conventional_update(&call, stream, &error), error);
  }

  void allocate() {
    const int64_t b = rows, t = tokens, h = shape.heads, g = shape.groups, p = shape.headDim, n = shape.stateDim;
    workspace = pool.same(kWorkspaceBytes / 4, 0).data;
    args.struct_size = sizeof(args);
    args.abi_version = RSSM_ABI_VERSION;
    args.kind = shape.kind;
    args.window = window;
    args.value = pool.act({b, t, h, p});
    args.k = pool.act({b, t, g, n});
    args.q = pool.act({b, t, g, n});
    if (shape.kind == RSSM_MAMBA2) {
      args.dt = pool.real({b, t, h}, 0.001f, 0.1f);
      args.a = pool.real({h}, -16.0f, -1.0f);
      args.skip = pool.real({h});
    } else {
      args.log_decay = pool.real({b, t, h}, -0.2f, -0.001f);
      args.beta = pool.real({b, t, h}, 0.1f, 1.0f);
    }
    args.out = pool.act({b, t, h, p});
    args.num_tokens = pool.same(b, tokens);
    for (int r = 0; r < rotations; ++r) slotByRotation.push_back(pool.integers(slotsOf(r)).data);
    args.slot = contiguousView(slotByRotation[0], RSSM_INT32, {b});
    if (conventional) {
      states = pool.real({slots, entries, h, p * n});
    } else {
      allocatePool();
    }
    cudaOk(cudaDeviceSynchronize(), "fill");
  }

  // Checkpoints, rings and cursors of all slots.
  void allocatePool() {
    const int64_t h = shape.heads, g = shape.groups, p = shape.headDim, n = shape.stateDim;
    if (gdn()) {
      args.ring_value = pool.half({slots, h, ringRows, p});
      args.ring_dt = pool.real({slots, h, ringRows}, -0.2f, -0.001f);
      args.ring_key_factor = pool.real({slots, g, ringRows}, 0.1f, 0.2f);
    } else {
      args.ring_value = pool.act({slots, h, ringRows, p});
      args.ring_dt = pool.real({slots, h, ringRows}, 0.001f, 0.1f);
    }
    args.checkpoint = pool.real({slots, h, p, n});
    args.ring_k = pool.act({slots, g, ringRows, n});
    std::vector<int32_t> origin(static_cast<size_t>(slots));
    for (size_t i = 0; i < origin.size(); ++i) origin[i] = originOf(static_cast<int64_t>(i));
    args.origin = pool.integers(origin);
    for (int pending = 0; pending <= window; ++pending) {
      pendingByH.push_back(pool.same(slots, pending).data);
    }
    args.h = contiguousView(pendingByH[0], RSSM_INT32, {slots});
  }
};
