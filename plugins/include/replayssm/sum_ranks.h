/*
 * The sum of rows over the ranks that share a model, with the residual sum and the RMSNorm behind it, in one launch.
 * 16-bit tensors, float32 inside, added in the order of the ranks: every rank gets the same bits.
 *
 * Ranks push their rows into each other's inboxes, over memory that all of them map, and take what came from their own;
 * a word that has not come yet holds a mark. Nothing else is exchanged, and no rank is told when a call ends: the two
 * halves of an inbox take turns. Every rank makes the same calls in the same order, each on one stream.
 */
#ifndef REPLAYSSM_SUM_RANKS_H
#define REPLAYSSM_SUM_RANKS_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RSSM_MAX_RANKS 8
/* What every 32-bit word of an inbox is at first, and again once taken: two negative zeros, which no rank sends. */
#define RSSM_INBOX_MARK 0x80008000u

/* Launch with programmatic stream serialisation; waits on the device before it reads anything but weight. */
enum { RSSM_SUM_RANKS_PROGRAMMATIC_LAUNCH = 1 };

/*
 * s = x of rank 0 + x of rank 1 + ... + residual, rounded once to act; sum = s; out = s / sqrt(mean(s^2) + eps)
 * (weight_offset + weight) over each row. Negative zeros of x count as zeros. NaN where waiting was given up.
 */
typedef struct rssm_sum_ranks_args {
  uint32_t struct_size; /* sizeof(rssm_sum_ranks_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_SUM_RANKS_* */
  float eps;            /* >= 0 */
  float weight_offset;  /* 0, or 1 where weights are stored less one; added in float32 */
  int32_t rank;         /* 0..ranks - 1 */
  int32_t ranks;        /* 2..RSSM_MAX_RANKS */
  int32_t capacity;     /* rows of an inbox, >= R */
  int64_t patience_ns;  /* > 0: how long a word is waited for */

  void* inbox[RSSM_MAX_RANKS]; /* of each rank, as this process maps it: [2, ranks, capacity, D] act, contiguous */
  int32_t* gave_up; /* 0 at first, in memory of the host that the device reaches; not 0: nothing is waited for any more.
                       Written by whoever gives up, a launch whose patience ends included */

  rssm_tensor x;        /* [R, D] act = bfloat16 | float16, channels contiguous; D a multiple of 8 up to 8192, the same in
                           every call over these inboxes; rows at multiples of 16 bytes, as those of all tensors here */
  rssm_tensor residual; /* [R, D] act, channels contiguous; nullable */
  rssm_tensor weight;   /* [D] float32, contiguous; nullable: no norm */
  rssm_tensor turn;     /* [capacity] int32, contiguous, 0 at first; belongs to the inbox, written */
  rssm_tensor sum;      /* [R, D] act, channels contiguous, written; may be x or residual */
  rssm_tensor out;      /* [R, D] act, channels contiguous, written; null iff weight is */
} rssm_sum_ranks_args;

RSSM_API rssm_status rssm_sum_ranks(const rssm_sum_ranks_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
