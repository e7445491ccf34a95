/*
 * Giving slots to new sequences: their cursors, once for all layers, and one layer's states.
 *
 * Rings, convolution windows and KV need no reset: what is not committed is never read.
 */
#ifndef REPLAYSSM_SLOTS_H
#define REPLAYSSM_SLOTS_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Letters: R slots to reset, S slots of the pool. Entries of `slot` outside 0..S-1 are skipped; no slot twice. */
typedef struct rssm_reset_slots_args {
  uint32_t struct_size; /* sizeof(rssm_reset_slots_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */

  rssm_tensor slot;         /* [R] int32, any stride; -1 = skip */
  rssm_tensor new_seed;     /* [R] int64, any stride */
  rssm_tensor new_position; /* [R] int32, any stride; tokens the state has absorbed; null: 0 */
  rssm_tensor origin;       /* [S] int32, contiguous, 0 written */
  rssm_tensor h;            /* [S] int32, contiguous, 0 written */
  rssm_tensor position;     /* [S] int32, contiguous, new_position written */
  rssm_tensor seed;         /* [S] int64, contiguous, new_seed written */
} rssm_reset_slots_args;

/* Cursors of the given slots: origin = h = 0, position and seed as given. */
RSSM_API rssm_status rssm_reset_slots(const rssm_reset_slots_args* args, void* stream, rssm_error* error);

typedef struct rssm_clear_state_args {
  uint32_t struct_size; /* sizeof(rssm_clear_state_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */

  rssm_tensor slot;             /* [R] int32, any stride; -1 = skip */
  rssm_tensor checkpoint;       /* [S, H, P, N] float32 | float16 | e4m3, written; all but the slot axis contiguous */
  rssm_tensor checkpoint_scale; /* [S, H, P, ceil(N / 128)] float32, e4m3 only, written */
  rssm_tensor read;             /* [S, H, P, N] float16 | e4m3 | e2m1, written; nullable */
  rssm_tensor read_scale;       /* e4m3: [S, H, P, ceil(N / 128)] float32; e2m1: [S, H, P, N / 16] e4m3; written */
  rssm_tensor read_head_scale;  /* [S, H] float32, e2m1 only, written */
} rssm_clear_state_args;

/* One layer's states of the given slots: zero, with scales of one. */
RSSM_API rssm_status rssm_clear_state(const rssm_clear_state_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
