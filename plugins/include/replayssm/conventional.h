/*
 * The conventional decode step of one layer, the baseline of ReplaySSM: read the recurrent state, apply the step's
 * tokens, write the state after each token (1 read + T writes). Same recurrences and inputs as rssm_update.
 *
 * A slot owns E state entries. The current one is `entry[slot]`; token t writes entry (entry + 1 + t) mod E, so that a
 * verifier can return to the state after any accepted token. E = 1 is plain decoding in place (T = 1). The cursor is
 * read only: after a step that kept `a` tokens it moves to (entry + a) mod E, once for all layers, by
 * rssm_conventional_commit.
 *
 * Letters as in update.h. Rows with slot -1 or num_tokens 0 read and write nothing but a zero output.
 */
#ifndef REPLAYSSM_CONVENTIONAL_H
#define REPLAYSSM_CONVENTIONAL_H

#include <stddef.h>

#include "replayssm/status.h"
#include "replayssm/tensor.h"
#include "replayssm/update.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As RSSM_UPDATE_PROGRAMMATIC_LAUNCH. */
enum { RSSM_CONVENTIONAL_PROGRAMMATIC_LAUNCH = 1 };

/* Beside it: the promise of RSSM_UPDATE_SETTLED_STATE, for slot, num_tokens, entry and state. */
enum { RSSM_CONVENTIONAL_SETTLED_STATE = 2 };

typedef struct rssm_conventional_args {
  uint32_t struct_size; /* sizeof(rssm_conventional_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t kind;         /* RSSM_MAMBA2 or RSSM_GDN */
  uint32_t flags;       /* RSSM_CONVENTIONAL_* */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; 0..T, clamped */
  rssm_tensor entry;      /* [S] int32, 0..E-1; null: 0 */

  rssm_tensor value;     /* [B, T, H, P] act; Mamba-2 x, GDN v */
  rssm_tensor k;         /* [B, T, G, N] act, raw */
  rssm_tensor q;         /* [B, T, G, N] act, raw */
  rssm_tensor dt;        /* [B, T, H] float32 after softplus; Mamba-2 only */
  rssm_tensor a;         /* [H] float32, -exp(A_log); Mamba-2 only */
  rssm_tensor skip;      /* [H] float32, D; Mamba-2 only, nullable */
  rssm_tensor log_decay; /* [B, T, H] float32; GDN only */
  rssm_tensor beta;      /* [B, T, H] float32; GDN only */
  rssm_tensor out;       /* [B, T, H, P] act, written; tokens from num_tokens on are zero */

  rssm_tensor state; /* [S, E, H, P * N] float32, P rows of N; T <= max(E - 1, 1); written */
} rssm_conventional_args;

/*
 * Moves the cursors of all rows after a step, once for all layers. Per row: n = num_tokens clamped to 0..E - 1, a =
 * accepted clamped to 0..n; entry = (entry + a) mod E, position += a. Rows with slot -1 (or any other that is no slot)
 * change nothing. Two rows must not name the same slot.
 */
typedef struct rssm_conventional_commit_args {
  uint32_t struct_size; /* sizeof(rssm_conventional_commit_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t entries;      /* E, 2..17 */
  int32_t reserved;     /* 0 */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; what the step was given */
  rssm_tensor accepted;   /* [B] int32, any stride; base token plus accepted drafts */
  rssm_tensor entry;      /* [S] int32, contiguous, written */
  rssm_tensor position;   /* [S] int32, contiguous, written */
} rssm_conventional_commit_args;

RSSM_API rssm_status rssm_conventional_commit(const rssm_conventional_commit_args* args, void* stream,
                                              rssm_error* error);

/* Enqueues the step on `stream` (a cudaStream_t). Allocates nothing, needs no workspace, does not synchronise. */
RSSM_API rssm_status rssm_conventional_update(const rssm_conventional_args* args, void* stream, rssm_error* error);

/*
 * The launch that such a step takes on a device of `multiprocessors`, in words, into text (NUL-terminated, truncated
 * when too long). A pure function of the sizes: no device is looked at.
 */
RSSM_API rssm_status rssm_conventional_launch_text(const rssm_conventional_args* args, int32_t multiprocessors,
                                                   char* text, size_t text_bytes, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
