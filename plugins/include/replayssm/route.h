/*
 * From router logits to the chosen experts and their weights, sorted by score, ties to the lower expert.
 *
 * softmax: scores = softmax(logits), chosen by score. sigmoid: scores = sigmoid(logits), chosen by score + bias within
 * the topk_group groups of experts whose two best members sum up highest. weight = score, over the sum of the chosen
 * scores + 1e-20 where norm_topk is set, times scaling. All in float32.
 */
#ifndef REPLAYSSM_ROUTE_H
#define REPLAYSSM_ROUTE_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launch with programmatic stream serialisation; waits on the device before it reads anything. */
enum { RSSM_ROUTE_PROGRAMMATIC_LAUNCH = 1 };
enum { RSSM_ROUTER_SOFTMAX = 0, RSSM_ROUTER_SIGMOID = 1 };

typedef struct rssm_route_args {
  uint32_t struct_size; /* sizeof(rssm_route_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_ROUTE_* */
  int32_t router;       /* RSSM_ROUTER_* */
  int32_t groups;       /* of experts, 1..32, divides E; 1 with softmax */
  int32_t topk_group;   /* 1..groups */
  int32_t norm_topk;    /* 0 or 1 */
  float scaling;

  rssm_tensor logits;     /* [B, T, E] float32, experts contiguous; E <= 1024 */
  rssm_tensor bias;       /* [E] float32, contiguous; nullable; absent with softmax */
  rssm_tensor slot;       /* [B] int32, -1: the row gives no work; nullable with num_tokens: every token exists */
  rssm_tensor num_tokens; /* [B] int32, tokens of the row that exist */
  rssm_tensor ids;        /* [B T, k] int32, contiguous, k <= 32; written, -1 for tokens that do not exist */
  rssm_tensor weights;    /* [B T, k] float32, contiguous; written, 0 for tokens that do not exist */
} rssm_route_args;

RSSM_API rssm_status rssm_route(const rssm_route_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
