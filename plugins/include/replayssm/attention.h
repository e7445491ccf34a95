/*
 * Attention of decode and verify steps over the KV slots: what goes into it, and the attention itself.
 *
 * Row b holds tokens i = 0..T-1 of slot[b] at absolute positions start[b] + i; tokens i >= num_tokens[b], and all of a row
 * whose slot is negative, do not exist. Query head h belongs to key head h / (Hq / Hkv).
 */
#ifndef REPLAYSSM_ATTENTION_H
#define REPLAYSSM_ATTENTION_H

#include <stddef.h>

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launch with programmatic stream serialisation; waits on the device before it reads anything but weights and table. */
enum { RSSM_ATTENTION_PROGRAMMATIC_LAUNCH = 1 };

/*
 * RMSNorm of every query and key head (where weights are given), rotary embedding of their first 2 * R channels, pairs
 * (i, i + R) (where a table is given), keys and values written into the slots. Float32 inside, rounded once.
 * Tokens that do not exist are not read; nothing is written for them.
 */
typedef struct rssm_attention_inputs_args {
  uint32_t struct_size;  /* sizeof(rssm_attention_inputs_args) */
  uint32_t abi_version;  /* RSSM_ABI_VERSION */
  uint32_t flags;        /* RSSM_ATTENTION_* */
  float eps;             /* >= 0; of the norms */
  float weight_offset;   /* 0, or 1 where weights are stored less one */
  int32_t reserved;      /* 0 */

  rssm_tensor slot;       /* [B] int32, contiguous; negative: padding; others below S */
  rssm_tensor start;      /* [B] int32, contiguous; start + num_tokens <= depth */
  rssm_tensor num_tokens; /* [B] int32, contiguous; 0..T */
  rssm_tensor q;          /* [B, T, Hq, D] bfloat16 | float16 (act), channels contiguous, 16-byte aligned */
  rssm_tensor k;          /* [B, T, Hkv, D] as q */
  rssm_tensor v;          /* [B, T, Hkv, D] as q */
  rssm_tensor q_weight;   /* [D] float32, contiguous; nullable: no norm */
  rssm_tensor k_weight;   /* [D] float32, contiguous; null iff q_weight is */
  rssm_tensor cosine;     /* [>= depth, R] float32, contiguous, R a multiple of 8, 2 R <= D; nullable: no rotation */
  rssm_tensor sine;       /* as cosine; null iff cosine is */
  rssm_tensor q_out;      /* [B, T, Hq, D] act, contiguous, written; may be q */
  rssm_tensor keys;       /* [S, Hkv, depth, D] act, contiguous, 16-byte aligned; written */
  rssm_tensor values;     /* as keys */
} rssm_attention_inputs_args;

RSSM_API rssm_status rssm_attention_inputs(const rssm_attention_inputs_args* args, void* stream, rssm_error* error);

/*
 * out = softmax(scale q k^T) v, causal: token i sees positions 0..start + i. Products of act, float32 sums.
 * Tokens that do not exist give zeros, whatever the caches hold beyond the tokens that do.
 * D is a multiple of 8, at most 256.
 */
typedef struct rssm_attention_args {
  uint32_t struct_size; /* sizeof(rssm_attention_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_ATTENTION_* */
  float scale;          /* usually 1 / sqrt(D) */

  rssm_tensor slot;       /* as above */
  rssm_tensor start;      /* as above */
  rssm_tensor num_tokens; /* as above */
  rssm_tensor q;          /* [B, T, Hq, D] act, contiguous, 16-byte aligned */
  rssm_tensor keys;       /* [S, Hkv, depth, D] act, contiguous, 16-byte aligned */
  rssm_tensor values;     /* as keys */
  rssm_tensor out;        /* [B, T, Hq, D] act, contiguous, 16-byte aligned, written; may be q */
} rssm_attention_args;

/* Device bytes rssm_attention needs beside its tensors, on a device of that many multiprocessors; looks at no device. */
RSSM_API rssm_status rssm_attention_workspace(const rssm_attention_args* args, int32_t multiprocessors, size_t* bytes,
                                              rssm_error* error);

/* The workspace's contents mean nothing before and after; 16-byte aligned. */
RSSM_API rssm_status rssm_attention(const rssm_attention_args* args, int32_t multiprocessors, void* workspace,
                                    size_t workspace_bytes, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
