// extern "C" face of state export and import: validate, flatten, launch.
#include "replayssm/state_io.h"

#include "abi/alignment.h"
#include "abi/call.h"
#include "abi/copies.h"
#include "abi/views.h"
#include "kernels/state_io/params.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxStates = 65535;    // states of one call lie along an axis of the grid, as do heads
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxStateDim = 256;
constexpr int kPiece = 4;  // columns of one access

StoredFormat formatOf(const rssm_tensor& t) {
  if (t.data == nullptr) return StoredFormat::kNone;
  switch (t.dtype) {
    case RSSM_FLOAT32: return StoredFormat::kFloat32;
    case RSSM_FLOAT16: return StoredFormat::kFloat16;
    case RSSM_FLOAT8_E4M3: return StoredFormat::kE4m3;
    default: return StoredFormat::kE2m1;
  }
}

StateCopy stateCopy(const rssm_tensor& t, const rssm_tensor& scale, const rssm_tensor* headScale) {
  StateCopy copy{};
  copy.format = formatOf(t);
  copy.data = t.data;
  copy.slotStride = t.stride[0];
  copy.scale = scale.data;
  copy.scaleSlotStride = scale.stride[0];
  if (headScale != nullptr) {
    copy.headScale = static_cast<float*>(headScale->data);
    copy.headScaleSlotStride = headScale->stride[0];
  }
  return copy;
}

// A pool tensor whose rows a kernel takes in pieces of four elements.
void checkPieces(Checker& check, const char* name, const rssm_tensor& t) {
  if (!check.ok()) return;
  const int bytes = static_cast<int>(elementBytes(t.dtype, kPiece));
  const bool slots = t.shape[0] <= 1 || t.stride[0] % kPiece == 0;
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(bytes) != 0 || !slots) {
    check.fail(RSSM_INVALID_ARGUMENT, name, "expected an address and a slot stride of whole %d bytes, got %p and %lld",
               bytes, t.data, static_cast<long long>(t.stride[0]));
  }
}

// Common to both directions: sizes, and the state beside the checkpoint.
void checkState(Checker& check, const rssm_tensor& slot, const rssm_tensor& checkpoint, const rssm_tensor& state) {
  const int64_t* s = checkpoint.shape;
  check.tensor("slot", slot, RSSM_INT32, {kAny});
  check.range("slot: E", slot.shape[0], 0, kMaxStates);
  check.range("checkpoint: H", s[1], 1, kMaxHeads);
  check.range("checkpoint: P", s[2], 1, kMaxHeadDim);
  check.range("checkpoint: N", s[3], 1, kMaxStateDim);
  if (check.ok() && s[3] % kPiece != 0) {
    check.fail(RSSM_UNSUPPORTED, "checkpoint: N", "expected a multiple of %d, got %lld", kPiece,
               static_cast<long long>(s[3]));
  }
  check.tensor("state", state, RSSM_FLOAT32, {slot.shape[0], s[1], s[2], s[3]});
  check.contiguous("state", state, 0);
  checkPieces(check, "state", state);
  checkPieces(check, "checkpoint", checkpoint);
}

void checkRing(Checker& check, const rssm_state_export_args& a) {
  const bool gdn = a.kind == RSSM_GDN;
  const int64_t* s = a.checkpoint.shape;
  const int32_t act = activationType(a.ring_k);
  checkPoolTensor(check, "ring_k", a.ring_k, act, {s[0], kAny, kAny, s[3]});
  checkPieces(check, "ring_k", a.ring_k);
  if (!check.ok()) return;
  const int64_t groups = a.ring_k.shape[1], rows = a.ring_k.shape[2];
  check.range("ring_k: C", rows, a.window + 1, INT32_MAX);
  if (groups < 1 || s[1] % groups != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "ring_k: G", "expected groups that divide the %lld heads, got %lld",
               static_cast<long long>(s[1]), static_cast<long long>(groups));
  }
  checkPoolTensor(check, "ring_value", a.ring_value, gdn ? RSSM_FLOAT16 : act, {s[0], s[1], rows, s[2]});
  checkPoolTensor(check, "ring_dt", a.ring_dt, RSSM_FLOAT32, {s[0], s[1], rows});
  if (!gdn) {
    check.tensor("a", a.a, RSSM_FLOAT32, {s[1]});
    check.contiguous("a", a.a, 0);
    return;
  }
  checkPoolTensor(check, "ring_key_factor", a.ring_key_factor, RSSM_FLOAT32, {s[0], groups, rows});
  if (a.ring_v.data != nullptr) {
    checkPoolTensor(check, "ring_v", a.ring_v, act, {s[0], s[1], rows, s[2]});
    checkPoolTensor(check, "ring_beta", a.ring_beta, RSSM_FLOAT32, {s[0], s[1], rows});
  }
}

void checkExport(Checker& check, const rssm_state_export_args& a) {
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  check.range("window", a.window, 1, 64);
  checkCheckpoint(check, a.checkpoint, a.checkpoint_scale, kAny);
  if (!check.ok()) return;
  checkState(check, a.slot, a.checkpoint, a.state);
  check.tensor("origin", a.origin, RSSM_INT32, {a.checkpoint.shape[0]});
  check.tensor("h", a.h, RSSM_INT32, {a.checkpoint.shape[0]});
  check.contiguous("origin", a.origin, 0);
  check.contiguous("h", a.h, 0);
  checkRing(check, a);
}

ExportParams flatten(const rssm_state_export_args& a) {
  auto ring = [](const rssm_tensor& t) { return RingTensor{t.data, t.stride[0]}; };
  ExportParams p{};
  p.states = static_cast<int32_t>(a.slot.shape[0]);
  p.slots = static_cast<int32_t>(a.checkpoint.shape[0]);
  p.heads = static_cast<int32_t>(a.checkpoint.shape[1]);
  p.groups = static_cast<int32_t>(a.ring_k.shape[1]);
  p.headDim = static_cast<int32_t>(a.checkpoint.shape[2]);
  p.stateDim = static_cast<int32_t>(a.checkpoint.shape[3]);
  p.window = a.window;
  p.ringRows = static_cast<int32_t>(a.ring_k.shape[2]);
  p.gdn = a.kind == RSSM_GDN;
  p.rederives = p.gdn && a.ring_v.data != nullptr;
  p.float16 = a.ring_k.dtype == RSSM_FLOAT16;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.origin = static_cast<const int32_t*>(a.origin.data);
  p.pending = static_cast<const int32_t*>(a.h.data);
  p.a = static_cast<const float*>(a.a.data);
  p.checkpoint = stateCopy(a.checkpoint, a.checkpoint_scale, nullptr);
  p.value = ring(a.ring_value);
  p.key = ring(a.ring_k);
  p.decay = ring(a.ring_dt);
  p.keyFactor = ring(a.ring_key_factor);
  p.v = ring(a.ring_v);
  p.beta = ring(a.ring_beta);
  p.state = static_cast<float*>(a.state.data);
  return p;
}

void checkImport(Checker& check, const rssm_state_import_args& a) {
  checkCopies(check, {a.checkpoint, a.checkpoint_scale, a.read, a.read_scale, a.read_head_scale}, kAny);
  if (!check.ok()) return;
  checkState(check, a.slot, a.checkpoint, a.state);
  check.range("layer", a.layer, 0, 65535);
  check.range("head_offset", a.head_offset, 0, 65535 - a.checkpoint.shape[1]);
  if (a.read.data != nullptr) checkPieces(check, "read", a.read);
  if (a.checkpoint.dtype == RSSM_FLOAT32) return;
  check.tensor("position", a.position, RSSM_INT32, {a.slot.shape[0]});
  check.tensor("seed", a.seed, RSSM_INT64, {a.slot.shape[0]});
}

ImportParams flatten(const rssm_state_import_args& a) {
  ImportParams p{};
  p.states = static_cast<int32_t>(a.slot.shape[0]);
  p.slots = static_cast<int32_t>(a.checkpoint.shape[0]);
  p.heads = static_cast<int32_t>(a.checkpoint.shape[1]);
  p.headDim = static_cast<int32_t>(a.checkpoint.shape[2]);
  p.stateDim = static_cast<int32_t>(a.checkpoint.shape[3]);
  p.layer = a.layer;
  p.headOffset = a.head_offset;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.position = static_cast<const int32_t*>(a.position.data);
  p.positionStride = a.position.stride[0];
  p.seed = static_cast<const int64_t*>(a.seed.data);
  p.seedStride = a.seed.stride[0];
  p.checkpoint = stateCopy(a.checkpoint, a.checkpoint_scale, nullptr);
  p.read = stateCopy(a.read, a.read_scale, &a.read_head_scale);
  p.state = static_cast<const float*>(a.state.data);
  return p;
}

template <class Args, class Launch>
rssm_status transfer(const char* operation, const Args* args, void* stream, rssm_error* error,
                     void (*verify)(Checker&, const Args&), Launch launch) {
  return checkedCall(operation, args, stream, error, verify, [launch](const Args& a, cudaStream_t on) {
    const auto params = flatten(a);
    return params.states == 0 ? cudaSuccess : launch(params, on);
  });
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_state_export(const rssm_state_export_args* args, void* stream, rssm_error* error) {
  return replayssm::transfer("rssm_state_export", args, stream, error, replayssm::checkExport, replayssm::launchExport);
}

rssm_status rssm_state_import(const rssm_state_import_args* args, void* stream, rssm_error* error) {
  return replayssm::transfer("rssm_state_import", args, stream, error, replayssm::checkImport, replayssm::launchImport);
}
