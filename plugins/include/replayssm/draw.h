/*
 * Tokens from logits: argmax, or a draw by inverse CDF after temperature, top-k, top-p and min-p, each request with its
 * own settings. float32 weights, float64 sums.
 *
 * Letters: B rows of T positions, V the vocabulary, S + 1 entries of settings.
 */
#ifndef REPLAYSSM_DRAW_H
#define REPLAYSSM_DRAW_H

#include <stddef.h>

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Ties go to the lowest id in every choice. A draw takes the first token, in the order of the ids, whose cumulative
 * weight exceeds u times the total; u has 53 bits of Philox4x32-10 with the request's seed as key and the counter
 * (0, 0, length + t, 2) for position t. Filters act in the order top-k, top-p, min-p.
 */
typedef struct rssm_draw_args {
  uint32_t struct_size; /* sizeof(rssm_draw_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* 0 */
  int32_t reserved;     /* 0 */

  rssm_tensor logits;      /* [B, T, V] float32, a position's contiguous */
  rssm_tensor row;         /* [B] int64: the entry of settings, 0..S; nullable, and all settings with it: every token is
                              the argmax */
  rssm_tensor length;      /* [S + 1] int64 */
  rssm_tensor seed;        /* [S + 1] int64 */
  rssm_tensor temperature; /* [S + 1] float32; 0: argmax */
  rssm_tensor top_k;       /* [S + 1] int64; 0: all */
  rssm_tensor top_p;       /* [S + 1] float32; 1: all */
  rssm_tensor min_p;       /* [S + 1] float32, of the best weight; 0: all */
  rssm_tensor tokens;      /* [B, T] int64, contiguous, written */
  rssm_tensor finite;      /* [B, T] int32, contiguous, written: 0 where the largest logit is no finite number, or one
                              is NaN; the token then means nothing, but lies in the vocabulary */
} rssm_draw_args;

/* Device bytes of the workspace, 16-byte aligned, whose contents do not matter, before or after. */
RSSM_API rssm_status rssm_draw_workspace(const rssm_draw_args* args, size_t* bytes, rssm_error* error);
RSSM_API rssm_status rssm_draw(const rssm_draw_args* args, void* workspace, size_t workspace_bytes, void* stream,
                               rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
