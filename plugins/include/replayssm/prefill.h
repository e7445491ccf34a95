/*
 * A prompt, or one chunk of it, for one layer: chunked scan of the recurrence from a state the layer already has.
 *
 * Per row: the state before the chunk is the checkpoint with its h committed records folded in (paper, Eq. 5; GDN whose
 * flush re-derives, Alg. 6), or zero, or a float32 carry, as `row_flags` says; then come num_tokens tokens, whose outputs
 * are written; the state after them goes, rounded, into the checkpoint and its separate read copy, or unrounded into the
 * carry when more chunks of the prompt follow. Cursors are read only: rssm_prefill_commit moves them afterwards, once for
 * all layers. The ring is not written.
 *
 * Letters: B rows, T tokens, S slots, H value heads, G key heads (groups; H is a multiple of G), P = d_v, N = d_k,
 * C ring rows, K carries. Rows with slot -1 or num_tokens 0 read and write nothing but a zero output; so do rows whose
 * flags name a carry that does not exist.
 * HAZARD: a prefill must not be repeated before its commit; it would fold the committed records twice.
 */
#ifndef REPLAYSSM_PREFILL_H
#define REPLAYSSM_PREFILL_H

#include <stddef.h>

#include "replayssm/status.h"
#include "replayssm/tensor.h"
#include "replayssm/update.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Flags of a row; 0: from the checkpoint and its records, into the checkpoint. FROM_ZERO and FROM_CARRY exclude. */
enum {
  RSSM_PREFILL_FROM_ZERO = 1,  /* a fresh sequence: neither checkpoint nor records are read */
  RSSM_PREFILL_FROM_CARRY = 2, /* not the first chunk of a prompt */
  RSSM_PREFILL_TO_CARRY = 4    /* not the last chunk of a prompt: the checkpoint stays as it is */
};

typedef struct rssm_prefill_args {
  uint32_t struct_size; /* sizeof(rssm_prefill_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t kind;         /* RSSM_MAMBA2 or RSSM_GDN */
  int32_t window;       /* L, 1..64 */
  int32_t layer;        /* absolute layer index, keys stochastic rounding */
  int32_t head_offset;  /* global index of head 0 (tensor parallelism), keys stochastic rounding */
  uint32_t flags;       /* 0 */
  int32_t reserved;     /* 0 */

  rssm_tensor slot;        /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens;  /* [B] int32, any stride; 0..T, clamped */
  rssm_tensor row_flags;   /* [B] int32, any stride, RSSM_PREFILL_*; nullable: all 0 */
  rssm_tensor carry_index; /* [B] int32, any stride, 0..K-1; nullable without carry; read only for rows with a carry */
  rssm_tensor origin;      /* [S] int32, ring row of the oldest committed record */
  rssm_tensor h;           /* [S] int32, committed records, 0..window */
  rssm_tensor position;    /* [S] int32, tokens before this chunk; nullable unless rounding is stochastic */
  rssm_tensor seed;        /* [S] int64; nullable unless rounding is stochastic */

  rssm_tensor value;     /* [B, T, H, P] act; Mamba-2 x, GDN v */
  rssm_tensor k;         /* [B, T, G, N] act, raw */
  rssm_tensor q;         /* [B, T, G, N] act, raw */
  rssm_tensor dt;        /* [B, T, H] float32 after softplus; Mamba-2 only */
  rssm_tensor a;         /* [H] float32, -exp(A_log), log-decay is dt * a; Mamba-2 only */
  rssm_tensor skip;      /* [H] float32, D: adds D x to the output; Mamba-2 only, nullable */
  rssm_tensor log_decay; /* [B, T, H] float32; GDN only */
  rssm_tensor beta;      /* [B, T, H] float32; GDN only */
  rssm_tensor out;       /* [B, T, H, P] act, written; tokens from num_tokens on are zero */

  rssm_tensor checkpoint;       /* [S, H, P, N] float32 | float16 | e4m3, read and written */
  rssm_tensor checkpoint_scale; /* [S, H, P, ceil(N / 128)] float32, e4m3 only, read and written */
  rssm_tensor read;             /* [S, H, P, N] float16 | e4m3 | e2m1 copy, written; null: shared */
  rssm_tensor read_scale;       /* e4m3: [S, H, P, ceil(N / 128)] float32; e2m1: [S, H, P, N / 16] e4m3 */
  rssm_tensor read_head_scale;  /* [S, H] float32, e2m1 only */

  rssm_tensor ring_value;      /* [S, H, C, P]; Mamba-2 x in act, GDN u in float16 */
  rssm_tensor ring_k;          /* [S, G, C, N] act, raw */
  rssm_tensor ring_dt;         /* [S, H, C] float32; Mamba-2 dt, GDN log-decay */
  rssm_tensor ring_key_factor; /* [S, G, C] float32, 1 / |k|; GDN only */
  rssm_tensor ring_v;          /* [S, H, C, P] act; GDN that re-derives only */
  rssm_tensor ring_beta;       /* [S, H, C] float32; GDN that re-derives only */

  rssm_tensor carry; /* [K, H, P, N] float32, states between the chunks of one prompt; nullable without such rows */
} rssm_prefill_args;

/*
 * Device bytes the launch needs beside the tensors of `args`, in *bytes; may be 0. 16-byte aligned; contents do not
 * matter, before or after. HAZARD: launches that may overlap (other streams) need workspaces of their own.
 */
RSSM_API rssm_status rssm_prefill_workspace(const rssm_prefill_args* args, size_t* bytes, rssm_error* error);

/* Enqueues the scan on `stream` (a cudaStream_t). Allocates nothing and does not synchronise. */
RSSM_API rssm_status rssm_prefill(const rssm_prefill_args* args, void* workspace, size_t workspace_bytes, void* stream,
                                  rssm_error* error);

/* The combinations this library holds, one per line, for messages and tests. */
RSSM_API const char* rssm_prefill_supported(void);

/*
 * Moves the cursors of all rows after a prompt chunk, once for all layers: origin = h = 0, position += n with
 * n = num_tokens clamped to 0..max_tokens. Rows with slot -1 or n = 0 change nothing. Two rows must not name the same
 * slot.
 */
typedef struct rssm_prefill_commit_args {
  uint32_t struct_size; /* sizeof(rssm_prefill_commit_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t max_tokens;   /* T of the prefill */
  int32_t reserved;     /* 0 */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; what the prefill was given */
  rssm_tensor origin;     /* [S] int32, written */
  rssm_tensor h;          /* [S] int32, written */
  rssm_tensor position;   /* [S] int32, written */
} rssm_prefill_commit_args;

RSSM_API rssm_status rssm_prefill_commit(const rssm_prefill_commit_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
