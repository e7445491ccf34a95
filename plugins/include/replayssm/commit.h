/*
 * Moves the cursors of all rows after a step, once for all layers (paper, Appendix D.1).
 *
 * Per row: n = num_tokens clamped to 0..C - window, a = accepted clamped to 0..n; if h + n > window the folded window
 * is dropped: origin = (origin + h) mod C, h = 0; then h += a and position += a. Applied also when a = 0. Rows with
 * slot -1 (or any other that is no slot) change nothing. Two rows must not name the same slot.
 */
#ifndef REPLAYSSM_COMMIT_H
#define REPLAYSSM_COMMIT_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rssm_commit_args {
  uint32_t struct_size; /* sizeof(rssm_commit_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t window;       /* L, 1..64 */
  int32_t ring_rows;    /* C, window < C <= window + 16 */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; what the step was given */
  rssm_tensor accepted;   /* [B] int32, any stride; base token plus accepted drafts */
  rssm_tensor origin;     /* [S] int32, written */
  rssm_tensor h;          /* [S] int32, written */
  rssm_tensor position;   /* [S] int32, written */
} rssm_commit_args;

RSSM_API rssm_status rssm_commit(const rssm_commit_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
