// extern "C" face of slots that change hands: validate, flatten, launch.
#include "replayssm/slots.h"

#include "abi/call.h"
#include "abi/copies.h"
#include "kernels/slots/slots.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxSlots = 65535;  // slots of one call lie along a grid's second axis
constexpr uint32_t kOneFloat32 = 0x3f800000u;
constexpr uint32_t kOneE4m3 = 0x38383838u;  // four times

// `pool`: a tensor of the slots' pool.
SlotList slotList(const rssm_tensor& t, const rssm_tensor& pool) {
  return {static_cast<int32_t>(t.shape[0]), static_cast<int32_t>(pool.shape[0]), static_cast<const int32_t*>(t.data),
          t.stride[0]};
}

void checkReset(Checker& check, const rssm_reset_slots_args& a) {
  check.tensor("slot", a.slot, RSSM_INT32, {kAny});
  check.range("slot: R", a.slot.shape[0], 0, kMaxSlots);
  check.tensor("new_seed", a.new_seed, RSSM_INT64, {a.slot.shape[0]});
  if (a.new_position.data != nullptr) check.tensor("new_position", a.new_position, RSSM_INT32, {a.slot.shape[0]});
  check.tensor("origin", a.origin, RSSM_INT32, {kAny});
  check.tensor("h", a.h, RSSM_INT32, {a.origin.shape[0]});
  check.tensor("position", a.position, RSSM_INT32, {a.origin.shape[0]});
  check.tensor("seed", a.seed, RSSM_INT64, {a.origin.shape[0]});
  check.contiguous("origin", a.origin, 0);
  check.contiguous("h", a.h, 0);
  check.contiguous("position", a.position, 0);
  check.contiguous("seed", a.seed, 0);
}

void fill(Checker& check, const SlotList& slots, const rssm_tensor& t, uint32_t pattern, cudaStream_t stream) {
  if (!check.ok()) return;
  int64_t elements = 1;
  for (int axis = 1; axis < t.rank; ++axis) elements *= t.shape[axis];
  if (elements == 0) return;
  FillParams p{slots, t.data, elementBytes(t.dtype, elements), elementBytes(t.dtype, t.stride[0]), pattern};
  checkLaunch(check, launchFill(p, stream));
}

cudaError_t reset(const rssm_reset_slots_args& a, cudaStream_t stream) {
  if (a.slot.shape[0] == 0) return cudaSuccess;
  ResetParams p{};
  p.slots = slotList(a.slot, a.origin);
  p.newSeed = static_cast<const int64_t*>(a.new_seed.data);
  p.newSeedStride = a.new_seed.stride[0];
  p.newPosition = static_cast<const int32_t*>(a.new_position.data);
  p.newPositionStride = a.new_position.stride[0];
  p.origin = static_cast<int32_t*>(a.origin.data);
  p.pending = static_cast<int32_t*>(a.h.data);
  p.position = static_cast<int32_t*>(a.position.data);
  p.seed = static_cast<int64_t*>(a.seed.data);
  return launchReset(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_reset_slots(const rssm_reset_slots_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_reset_slots", args, stream, error, replayssm::checkReset, replayssm::reset);
}

rssm_status rssm_clear_state(const rssm_clear_state_args* args, void* stream, rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_clear_state", error);
  if (!checkArguments(check, args)) return check.status();
  const rssm_clear_state_args& a = *args;
  check.tensor("slot", a.slot, RSSM_INT32, {kAny});
  check.range("slot: R", a.slot.shape[0], 0, kMaxSlots);
  checkCopies(check, {a.checkpoint, a.checkpoint_scale, a.read, a.read_scale, a.read_head_scale}, kAny);
  if (!check.ok() || a.slot.shape[0] == 0) return check.status();
  const SlotList slots = slotList(a.slot, a.checkpoint);
  const auto on = static_cast<cudaStream_t>(stream);
  fill(check, slots, a.checkpoint, 0, on);
  if (a.checkpoint.dtype == RSSM_FLOAT8_E4M3) fill(check, slots, a.checkpoint_scale, kOneFloat32, on);
  if (a.read.data == nullptr) return check.status();
  fill(check, slots, a.read, 0, on);
  if (a.read.dtype == RSSM_FLOAT8_E4M3) fill(check, slots, a.read_scale, kOneFloat32, on);
  if (a.read.dtype == RSSM_FLOAT4_E2M1) {
    fill(check, slots, a.read_scale, kOneE4m3, on);
    fill(check, slots, a.read_head_scale, kOneFloat32, on);
  }
  return check.status();
}
