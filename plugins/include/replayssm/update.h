/*
 * One decode step of ReplaySSM for one layer: 1 <= T <= 16 tokens a row, plain and speculative alike.
 *
 * Output-only evaluation from the checkpoint and the ring of records (paper, Eq. 5-6, 10-11); the new records are
 * appended behind the committed ones. A row with h + num_tokens > window first folds its h committed records into the
 * checkpoint, in the same launch. Cursors are read only: rssm_commit moves them afterwards, once for all layers.
 *
 * Letters: B rows, T tokens, S slots, H value heads, G key heads (groups; H is a multiple of G), P = d_v, N = d_k,
 * C ring rows with window + T <= C <= 256. Rows with slot -1 or num_tokens 0 read and write nothing but a zero output.
 * HAZARD: an update that flushed must not be repeated before its commit; it would fold the records twice.
 */
#ifndef REPLAYSSM_UPDATE_H
#define REPLAYSSM_UPDATE_H

#include <stddef.h>

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RSSM_MAMBA2 = 1, RSSM_GDN = 2 };

/*
 * Launch with programmatic stream serialisation: the kernel starts while its predecessor on the stream drains, and
 * waits for it on the device before it reads anything.
 */
enum { RSSM_UPDATE_PROGRAMMATIC_LAUNCH = 1 };

/*
 * Beside it: a promise of the host. Nothing that may still run when the launch begins writes slot, num_tokens, cursors,
 * checkpoints or rings of the launch's rows (a, skip neither), so the kernel reads those before it waits, and lets its
 * successor begin at once. The step's inputs may be its predecessor's outputs; they are read, and all is written,
 * after the wait. Successive layers keep the promise where a layer's other kernels lie between a state's two updates.
 */
enum { RSSM_UPDATE_SETTLED_STATE = 2 };

/*
 * The kernels of a step. PLAIN: one token a row, the state in registers. DIRECT: a CTA for each head. STREAMED: persistent
 * CTAs that are dealt the heads of all rows. PARTS: states that are not float32, a CTA for some heads of a group.
 */
enum { RSSM_UPDATE_PLAIN = 1, RSSM_UPDATE_DIRECT = 2, RSSM_UPDATE_STREAMED = 3, RSSM_UPDATE_PARTS = 4 };

/*
 * Launch constants for callers who have measured them; each 0 is the library's choice. A number needs a kernel that takes
 * it. Which kernel runs changes the order of sums, within the same bounds; the numbers only deal out the work. Captured
 * work keeps what it was captured with.
 */
typedef struct rssm_update_launch {
  int32_t kernel;          /* RSSM_UPDATE_PLAIN or another */
  int32_t multiprocessors; /* STREAMED: CTAs, 1..multiprocessors of the device */
  int32_t run_heads;       /* STREAMED: heads of a run dealt in turn; divides H / G */
  int32_t piece_heads;     /* STREAMED: heads of a piece drawn from a counter; divides H / G and run_heads. PARTS: of a CTA */
  int32_t drawn_rounds;    /* STREAMED: whole rounds of runs that are drawn as pieces, at most as many as there are */
  int32_t stages;          /* PARTS: heads in flight of a warp, 1 or 2 */
} rssm_update_launch;

/* The launch that a step takes. STREAMED: `rounds` runs of run_heads to each worker, then `pieces`, single heads last. */
typedef struct rssm_update_plan {
  int32_t kernel;                      /* RSSM_UPDATE_PLAIN or another; 0: nothing to launch */
  int32_t ctas, threads, shared_bytes; /* threads and dynamic shared memory of a CTA */
  int32_t stages;                      /* states in flight in a CTA (PARTS: in a warp); 0: no ring of stages */
  int32_t workers, rounds, run_heads;  /* STREAMED */
  int32_t pieces, piece_heads;         /* STREAMED; PARTS: piece_heads of a CTA */
  int32_t single_heads;                /* STREAMED: of the pieces, those of one head at the end */
} rssm_update_plan;

/* The most that rssm_update_workspace ever asks for: what a host reserves before it knows the sizes. */
#define RSSM_UPDATE_MAX_WORKSPACE_BYTES 16

typedef struct rssm_update_args {
  uint32_t struct_size; /* sizeof(rssm_update_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t kind;         /* RSSM_MAMBA2 or RSSM_GDN */
  int32_t window;       /* L, 1..64 */
  int32_t layer;        /* absolute layer index, keys stochastic rounding */
  int32_t head_offset;  /* global index of head 0 (tensor parallelism), keys stochastic rounding */
  uint32_t flags;       /* RSSM_UPDATE_* */
  int32_t reserved;     /* 0 */
  rssm_update_launch launch; /* zero: the library chooses */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; 0..T, clamped */
  rssm_tensor origin;     /* [S] int32, ring row of the oldest committed record */
  rssm_tensor h;          /* [S] int32, committed records, 0..window */
  rssm_tensor position;   /* [S] int32, committed tokens; nullable unless rounding is stochastic */
  rssm_tensor seed;       /* [S] int64; nullable unless rounding is stochastic */

  rssm_tensor value;     /* [B, T, H, P] act; Mamba-2 x, GDN v */
  rssm_tensor k;         /* [B, T, G, N] act, raw */
  rssm_tensor q;         /* [B, T, G, N] act, raw */
  rssm_tensor dt;        /* [B, T, H] float32 after softplus; Mamba-2 only */
  rssm_tensor a;         /* [H] float32, -exp(A_log), log-decay is dt * a; Mamba-2 only */
  rssm_tensor skip;      /* [H] float32, D: adds D x to the output; Mamba-2 only, nullable */
  rssm_tensor log_decay; /* [B, T, H] float32; GDN only */
  rssm_tensor beta;      /* [B, T, H] float32; GDN only */
  rssm_tensor out;       /* [B, T, H, P] act, written; tokens from num_tokens on are zero */

  rssm_tensor checkpoint;       /* [S, H, P, N] float32 | float16 | e4m3, written on flush */
  rssm_tensor checkpoint_scale; /* [S, H, P, ceil(N / 128)] float32, e4m3 only, written on flush */
  rssm_tensor read;             /* [S, H, P, N] float16 | e4m3 | e2m1 copy, written on flush; null: shared */
  rssm_tensor read_scale;       /* e4m3: [S, H, P, ceil(N / 128)] float32; e2m1: [S, H, P, N / 16] e4m3 */
  rssm_tensor read_head_scale;  /* [S, H] float32, e2m1 only */

  rssm_tensor ring_value;      /* [S, H, C, P]; Mamba-2 x in act, GDN u in float16; appended */
  rssm_tensor ring_k;          /* [S, G, C, N] act, raw; appended */
  rssm_tensor ring_dt;         /* [S, H, C] float32; Mamba-2 dt, GDN log-decay; appended */
  rssm_tensor ring_key_factor; /* [S, G, C] float32, 1 / |k|; GDN only; appended */
  rssm_tensor ring_v;          /* [S, H, C, P] act; GDN that re-derives only; appended */
  rssm_tensor ring_beta;       /* [S, H, C] float32; GDN that re-derives only; appended */
} rssm_update_args;

/*
 * Device bytes the launch needs beside the tensors of `args`, in *bytes. The workspace, 4-byte aligned, must be zero
 * before its first use; every launch leaves it zero. HAZARD: launches that may overlap (other streams) need workspaces of
 * their own.
 */
RSSM_API rssm_status rssm_update_workspace(const rssm_update_args* args, size_t* bytes, rssm_error* error);

/* Enqueues the step on `stream` (a cudaStream_t). Allocates nothing and does not synchronise. */
RSSM_API rssm_status rssm_update(const rssm_update_args* args, void* workspace, size_t workspace_bytes, void* stream,
                                 rssm_error* error);

/*
 * The launch that such a step takes on a device of `multiprocessors`: as numbers, and in words into text (NUL-terminated,
 * truncated when too long). Pure functions of the sizes and of args->launch: no device is looked at.
 */
RSSM_API rssm_status rssm_update_launch_plan(const rssm_update_args* args, int32_t multiprocessors,
                                             rssm_update_plan* plan, rssm_error* error);
RSSM_API rssm_status rssm_update_launch_text(const rssm_update_args* args, int32_t multiprocessors, char* text,
                                             size_t text_bytes, rssm_error* error);

/* The combinations this library holds, one per line, for messages and tests. */
RSSM_API const char* rssm_update_supported(void);

#ifdef __cplusplus
}
#endif
#endif
