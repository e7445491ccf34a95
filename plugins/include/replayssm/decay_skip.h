/*
 * The update that reads no checkpoint of a head that has forgotten it (paper, Appendix F), Mamba-2, float32 states.
 *
 * A head of a row has faded when the product of its decays since its checkpoint was written is at most skip_below: of
 * its h committed records, and, in a step that does not flush, of the step's first token. The step of a faded head uses
 * a checkpoint of zero and reads none of its bytes; its flush writes the folded records alone. All else is rssm_update.
 *
 * Bound: with M the largest norm of a row (over d_k) of any checkpoint, no row of a state ever differs by more than
 * skip_below / (1 - 2 skip_below) M in norm from the update's, and no output by more than that times |q|.
 */
#ifndef REPLAYSSM_DECAY_SKIP_H
#define REPLAYSSM_DECAY_SKIP_H

#include "replayssm/update.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rssm_decay_skip_args {
  uint32_t struct_size; /* sizeof(rssm_decay_skip_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  float skip_below;     /* in (0, 1/4]; 2^-9 is half a last place of a bfloat16 output */
  int32_t reserved;     /* 0 */

  rssm_update_args update; /* with its own header; kind RSSM_MAMBA2, checkpoint float32, no read copy, H / G <= 32 */
} rssm_decay_skip_args;

/* As rssm_update; the workspace is that of rssm_update_workspace for args->update, at most
 * RSSM_UPDATE_MAX_WORKSPACE_BYTES. */
RSSM_API rssm_status rssm_decay_skip_update(const rssm_decay_skip_args* args, void* workspace, size_t workspace_bytes,
                                            void* stream, rssm_error* error);

/* The combinations this library holds, one per line, for messages and tests. */
RSSM_API const char* rssm_decay_skip_supported(void);

#ifdef __cplusplus
}
#endif
#endif
