/*
 * The conventional state of one layer, [H, P, N] float32, out of and into checkpoint and ring.
 *
 * Export applies the committed records to the high-precision checkpoint without changing the pool; where flushes
 * re-derive GDN corrections (ring_v, ring_beta), so does export. Import writes both checkpoint copies, each rounded
 * from the float32 state as a flush does; rssm_reset_slots then sets the cursors, once for all layers.
 */
#ifndef REPLAYSSM_STATE_IO_H
#define REPLAYSSM_STATE_IO_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"
#include "replayssm/update.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Letters: E exported or imported states, S slots of the pool, C ring rows. A slot outside 0..S-1 is as -1. */
typedef struct rssm_state_export_args {
  uint32_t struct_size; /* sizeof(rssm_state_export_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t kind;         /* RSSM_MAMBA2 or RSSM_GDN */
  int32_t window;       /* L, 1..64 */

  rssm_tensor slot;   /* [E] int32, any stride; -1 = skip, its state is zero */
  rssm_tensor origin; /* [S] int32, contiguous */
  rssm_tensor h;      /* [S] int32, contiguous; 0..window */
  rssm_tensor a;      /* [H] float32, -exp(A_log), contiguous; Mamba-2 only */

  rssm_tensor checkpoint;       /* [S, H, P, N] float32 | float16 | e4m3; all but the slot axis contiguous */
  rssm_tensor checkpoint_scale; /* [S, H, P, ceil(N / 128)] float32, e4m3 only */
  rssm_tensor ring_value;       /* [S, H, C, P]; Mamba-2 x in act, GDN u in float16 */
  rssm_tensor ring_k;           /* [S, G, C, N] bfloat16 | float16 (act), raw */
  rssm_tensor ring_dt;          /* [S, H, C] float32; Mamba-2 dt, GDN log-decay */
  rssm_tensor ring_key_factor;  /* [S, G, C] float32; GDN only */
  rssm_tensor ring_v;           /* [S, H, C, P] act; GDN that re-derives only, else null */
  rssm_tensor ring_beta;        /* [S, H, C] float32; with ring_v */

  rssm_tensor state; /* [E, H, P, N] float32, contiguous, written */
} rssm_state_export_args;

RSSM_API rssm_status rssm_state_export(const rssm_state_export_args* args, void* stream, rssm_error* error);

typedef struct rssm_state_import_args {
  uint32_t struct_size; /* sizeof(rssm_state_import_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t layer;        /* absolute layer index, keys stochastic rounding */
  int32_t head_offset;  /* global index of head 0 (tensor parallelism), keys stochastic rounding */

  rssm_tensor slot;     /* [E] int32, any stride; -1 = skip */
  rssm_tensor position; /* [E] int32, any stride; tokens a state has absorbed; null unless rounding is stochastic */
  rssm_tensor seed;     /* [E] int64, any stride; null unless rounding is stochastic */
  rssm_tensor state;    /* [E, H, P, N] float32, contiguous */

  rssm_tensor checkpoint;       /* [S, H, P, N] float32 | float16 | e4m3, written; all but the slot axis contiguous */
  rssm_tensor checkpoint_scale; /* [S, H, P, ceil(N / 128)] float32, e4m3 only, written */
  rssm_tensor read;             /* [S, H, P, N] float16 | e4m3 | e2m1, written; nullable */
  rssm_tensor read_scale;       /* e4m3: [S, H, P, ceil(N / 128)] float32; e2m1: [S, H, P, N / 16] e4m3; written */
  rssm_tensor read_head_scale;  /* [S, H] float32, e2m1 only, written */
} rssm_state_import_args;

RSSM_API rssm_status rssm_state_import(const rssm_state_import_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
