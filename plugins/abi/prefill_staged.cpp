// Staging of states for a prompt chunk: see prefill_staged.h.
#include "abi/prefill_staged.h"

#include "abi/call.h"
#include "replayssm/state_io.h"

namespace replayssm {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

StagedRows rowsAt(const StagedLayout& l, char* workspace) {
  return {reinterpret_cast<int32_t*>(workspace + l.source), reinterpret_cast<int32_t*>(workspace + l.target),
          reinterpret_cast<int32_t*>(workspace + l.position), reinterpret_cast<int64_t*>(workspace + l.seed)};
}

rssm_tensor vectorOf(void* data, int32_t dtype, int64_t size) {
  rssm_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.rank = 1;
  t.shape[0] = size;
  t.stride[0] = 1;
  return t;
}

// [B, H, P, N] float32.
rssm_tensor stateOf(const PrefillParams& p) {
  rssm_tensor t{};
  t.data = p.staged;
  t.dtype = RSSM_FLOAT32;
  t.rank = 4;
  const int64_t shape[4] = {p.rows, p.heads, p.headDim, p.stateDim};
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    t.shape[axis] = shape[axis];
    t.stride[axis] = stride;
    stride *= shape[axis];
  }
  return t;
}

}  // namespace

StagedLayout stagedLayout(const PrefillParams& p) {
  const size_t rows = static_cast<size_t>(p.rows);
  StagedLayout l{};
  l.state = 0;
  l.seed = aligned(rows * p.heads * p.headDim * p.stateDim * sizeof(float));
  l.source = l.seed + aligned(rows * sizeof(int64_t));
  l.target = l.source + aligned(rows * sizeof(int32_t));
  l.position = l.target + aligned(rows * sizeof(int32_t));
  l.bytes = l.position + aligned(rows * sizeof(int32_t));
  return l;
}

rssm_status stageStates(const rssm_prefill_args& a, PrefillParams& p, char* workspace, cudaStream_t stream,
                        rssm_error* error) {
  const StagedLayout l = stagedLayout(p);
  const StagedRows rows = rowsAt(l, workspace);
  p.staged = reinterpret_cast<float*>(workspace + l.state);
  Checker check("rssm_prefill", error);
  if (!checkLaunch(check, launchStagedRows(p, rows, stream))) return check.status();
  rssm_state_export_args e{};
  e.struct_size = sizeof(e);
  e.abi_version = RSSM_ABI_VERSION;
  e.kind = a.kind;
  e.window = a.window;
  e.slot = vectorOf(rows.source, RSSM_INT32, p.rows);
  e.origin = a.origin;
  e.h = a.h;
  e.a = a.a;
  e.checkpoint = a.checkpoint;
  e.checkpoint_scale = a.checkpoint_scale;
  e.ring_value = a.ring_value;
  e.ring_k = a.ring_k;
  e.ring_dt = a.ring_dt;
  e.ring_key_factor = a.ring_key_factor;
  e.ring_v = a.ring_v;
  e.ring_beta = a.ring_beta;
  e.state = stateOf(p);
  return rssm_state_export(&e, stream, error);
}

rssm_status unstageStates(const rssm_prefill_args& a, const PrefillParams& p, char* workspace, cudaStream_t stream,
                          rssm_error* error) {
  const StagedRows rows = rowsAt(stagedLayout(p), workspace);
  rssm_state_import_args i{};
  i.struct_size = sizeof(i);
  i.abi_version = RSSM_ABI_VERSION;
  i.layer = a.layer;
  i.head_offset = a.head_offset;
  i.slot = vectorOf(rows.target, RSSM_INT32, p.rows);
  i.position = vectorOf(rows.position, RSSM_INT32, p.rows);
  i.seed = vectorOf(rows.seed, RSSM_INT64, p.rows);
  i.state = stateOf(p);
  i.checkpoint = a.checkpoint;
  i.checkpoint_scale = a.checkpoint_scale;
  i.read = a.read;
  i.read_scale = a.read_scale;
  i.read_head_scale = a.read_head_scale;
  return rssm_state_import(&i, stream, error);
}

}  // namespace replayssm
