/*
 * A decode step's inputs from per-slot registers, and the registers after it: which tokens count, what comes next. One
 * step can follow another without the host in between.
 *
 * Letters: B rows of T tokens, S slots, D >= T - 1 drafts, K stop tokens, M positions of a text. Registers have S + 1
 * entries; the last one serves rows of slot -1 (padding) and of any slot out of range.
 */
#ifndef REPLAYSSM_REGISTERS_H
#define REPLAYSSM_REGISTERS_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ids = last, drafts; num_tokens = 1 + drafts that exist, 0 for padding and for a request without room. */
typedef struct rssm_step_inputs_args {
  uint32_t struct_size; /* sizeof(rssm_step_inputs_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* 0 */
  int32_t reserved;     /* 0 */

  rssm_tensor slot;        /* [B] int32 */
  rssm_tensor last;        /* [S + 1] int64: the base token */
  rssm_tensor room;        /* [S + 1] int64: tokens the request may still emit; 0: it has ended */
  rssm_tensor draft;       /* [S + 1, D] int64 */
  rssm_tensor draft_count; /* [S + 1] int64; at most T - 1 count */
  rssm_tensor ids;         /* [B, T] int64, written */
  rssm_tensor num_tokens;  /* [B] int32, written */
  rssm_tensor row;         /* [B] int64, written: each row's entry of the registers */
} rssm_step_inputs_args;

RSSM_API rssm_status rssm_step_inputs(const rssm_step_inputs_args* args, void* stream, rssm_error* error);

/*
 * Of the tokens chosen behind each token of a step, the first `count` stand; they are cut behind the first stop token
 * and at the room that is left. A row that ran no tokens changes nothing; one with a position that is not finite emits
 * nothing and ends.
 */
typedef struct rssm_step_outcome_args {
  uint32_t struct_size; /* sizeof(rssm_step_outcome_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* 0 */
  int32_t reserved;     /* 0 */

  rssm_tensor slot;       /* [B] int32, no slot twice */
  rssm_tensor num_tokens; /* [B] int32, of rssm_step_inputs */
  rssm_tensor tokens;     /* [B, T] int64: chosen behind each token */
  rssm_tensor finite;     /* [B, T] int32: 0 where the logits were no numbers */
  rssm_tensor count;      /* [B] int64; nullable: one more than the drafts that equal the token chosen before them */
  rssm_tensor draft;      /* [S + 1, D] int64, as run */
  rssm_tensor stop_ids;   /* [S + 1, K] int64; -1: none */
  rssm_tensor last;       /* [S + 1] int64, changed, as are: */
  rssm_tensor length;     /* [S + 1] int64: tokens of the text */
  rssm_tensor room;       /* [S + 1] int64 */
  rssm_tensor history;    /* [S + 1, M] int64: the text; nullable */
  rssm_tensor emitted;    /* [B] int32, written: tokens that count, which is how many of the row to commit */
  rssm_tensor report;     /* [B, T + 3] int64, written: tokens; emitted; num_tokens; 1 for a broken row */
} rssm_step_outcome_args;

RSSM_API rssm_status rssm_step_outcome(const rssm_step_outcome_args* args, void* stream, rssm_error* error);

/*
 * Drafts by prompt lookup: what followed the most recent earlier occurrence of the longest suffix of at most max_ngram
 * tokens, begun again where it runs into the drafts. At most room - 1 drafts; none without an occurrence.
 */
typedef struct rssm_prompt_lookup_args {
  uint32_t struct_size; /* sizeof(rssm_prompt_lookup_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* 0 */
  int32_t max_ngram;    /* >= 1 */

  rssm_tensor row;         /* [B] int64: entries of the registers; out of range: the last one */
  rssm_tensor length;      /* [S + 1] int64 */
  rssm_tensor room;        /* [S + 1] int64 */
  rssm_tensor history;     /* [S + 1, M] int64 */
  rssm_tensor draft;       /* [S + 1, D] int64, D >= 1, written for these rows */
  rssm_tensor draft_count; /* [S + 1] int64, written for these rows */
} rssm_prompt_lookup_args;

RSSM_API rssm_status rssm_prompt_lookup(const rssm_prompt_lookup_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
