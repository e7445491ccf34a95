"""draw.h and registers.h: tokens from logits, and what a step leaves for the next one."""

from __future__ import annotations

import ctypes

from trtllm_replayssm.ops._abi.records import Args, fields


class DrawArgs(Args):
    """rssm_draw_args: a token for each position, by its request's settings or the argmax; see draw.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "reserved": ctypes.c_int32},
        "logits", "row", "length", "seed", "temperature", "top_k", "top_p", "min_p", "tokens", "finite",
    )  # fmt: skip


class StepInputsArgs(Args):
    """rssm_step_inputs_args: a step's inputs from the registers; see registers.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "reserved": ctypes.c_int32},
        "slot", "last", "room", "draft", "draft_count", "ids", "num_tokens", "row",
    )  # fmt: skip


class StepOutcomeArgs(Args):
    """rssm_step_outcome_args: which tokens count, and the registers after them; see registers.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "reserved": ctypes.c_int32},
        "slot", "num_tokens", "tokens", "finite", "count", "draft", "stop_ids", "last", "length", "room", "history",
        "emitted", "report",
    )  # fmt: skip


class PromptLookupArgs(Args):
    """rssm_prompt_lookup_args: drafts from the text itself; see registers.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "max_ngram": ctypes.c_int32},
        "row", "length", "room", "history", "draft", "draft_count",
    )  # fmt: skip
