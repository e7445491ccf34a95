/*
 * A step of the recovery schemes that the paper compares ReplaySSM with (Appendix A), for one layer: from a state, apply
 * cached tokens of the step before (its accepted ones), then this step's. The schemes are sequences of such steps over
 * several states; see docs/kernels.md. For measurements: the product does not use them.
 *
 * Per row: read `source`; apply `replayed` tokens of the cached inputs, without outputs; write `recovered` when it is
 * given; apply num_tokens tokens and write their outputs; write `end` when it is given. Both may be `source` itself.
 * Without cached inputs nothing is replayed, with T = 0 nothing is verified: a plain copy has neither.
 *
 * Letters and inputs as in update.h, act is bfloat16. Rows with slot -1 read and write nothing but a zero output.
 */
#ifndef REPLAYSSM_RECOVERY_H
#define REPLAYSSM_RECOVERY_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"
#include "replayssm/update.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rssm_recovery_args {
  uint32_t struct_size; /* sizeof(rssm_recovery_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t kind;         /* RSSM_MAMBA2 or RSSM_GDN */
  uint32_t flags;       /* 0 */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; 0..T, clamped */
  rssm_tensor replayed;   /* [B] int32, any stride; 0..R, clamped; null without cached inputs */

  rssm_tensor cached_value;     /* [B, R, H, P] act; null: R = 0 */
  rssm_tensor cached_k;         /* [B, R, G, N] act, raw */
  rssm_tensor cached_dt;        /* [B, R, H] float32; Mamba-2 only */
  rssm_tensor cached_log_decay; /* [B, R, H] float32; GDN only */
  rssm_tensor cached_beta;      /* [B, R, H] float32; GDN only */

  rssm_tensor value;     /* [B, T, H, P] act */
  rssm_tensor k;         /* [B, T, G, N] act, raw */
  rssm_tensor q;         /* [B, T, G, N] act, raw */
  rssm_tensor dt;        /* [B, T, H] float32 after softplus; Mamba-2 only */
  rssm_tensor a;         /* [H] float32; Mamba-2 only */
  rssm_tensor skip;      /* [H] float32; Mamba-2 only, nullable */
  rssm_tensor log_decay; /* [B, T, H] float32; GDN only */
  rssm_tensor beta;      /* [B, T, H] float32; GDN only */
  rssm_tensor out;       /* [B, T, H, P] act, written; tokens from num_tokens on are zero */

  rssm_tensor source;    /* [S, H, P * N] float32 */
  rssm_tensor recovered; /* [S, H, P * N] float32, written; nullable */
  rssm_tensor end;       /* [S, H, P * N] float32, written; nullable */
} rssm_recovery_args;

/* Enqueues the step on `stream` (a cudaStream_t). Allocates nothing, needs no workspace, does not synchronise. */
RSSM_API rssm_status rssm_recovery_step(const rssm_recovery_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
