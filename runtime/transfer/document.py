"""A request as a JSON document and arrays. Text, stop state, penalties, seeds and end rules follow from it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.request import Choice, Request, RequestState
from trtllm_replayssm.runtime.session.base import RawArray

REQUEST = ("prompt", "prompt_ids", "params", "seed", "limit", "priority", "cached_tokens", "choices")
CHOICE = (
    "position", "prefilled", "pending", "cuts", "token_ids", "logprobs", "finish_reason", "error", "draft",
)  # fmt: skip
PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name != "logits_mask")


def describe(request: Request, positions: Mapping[int, int]) -> dict[str, Any]:
    """Everything of a request but the state of its slots. positions: tokens that each choice's state has absorbed.

    Raises UnsupportedError for a request that follows a grammar.
    """
    if request.params.logits_mask is not None:
        raise UnsupportedError("export_request", "logits_mask", expected="a request without one", got="a grammar")
    params = {name: getattr(request.params, name) for name in PARAMS}
    params["logit_bias"] = None if request.params.logit_bias is None else sorted(request.params.logit_bias.items())
    for name in ("stop", "stop_token_ids"):
        if params[name] is not None and not isinstance(params[name], str):
            params[name] = list(params[name])
    return {
        "prompt": request.prompt,
        "prompt_ids": list(request.prompt_ids),
        "params": params,
        "seed": request.seed,
        "limit": request.rules.limit,
        "priority": request.priority,
        "cached_tokens": request.cached_tokens,
        "choices": [_describe_choice(choice, positions.get(choice.index)) for choice in request.choices],
    }


def _describe_choice(choice: Choice, position: int | None) -> dict[str, Any]:
    output, reason = choice.output, choice.output.finish_reason
    scored = choice.request.params.logprobs is not None
    return {
        "position": position,
        "prefilled": choice.prefilled,
        "pending": choice.pending,
        "cuts": list(choice.cuts),
        "token_ids": list(output.token_ids),
        "logprobs": [_describe_logprobs(entry) for entry in output.logprobs] if scored else None,
        "finish_reason": None if reason is None else reason.value,
        "error": output.error,
        "draft": list(choice.draft.tokens) if drafts_on(choice) else [],
    }


def _describe_logprobs(entry: TokenLogprobs) -> list[list[Any]]:
    return [[token, *asdict(logprob).values()] for token, logprob in entry.items()]


def drafts_on(choice: Choice) -> bool:
    """Whether its draft will be verified: an ended choice still has the one that it ended in."""
    return choice.state is not RequestState.FINISHED


def draft_arrays(request: Request) -> dict[str, RawArray]:
    """Distributions that drafts were drawn from, by choice."""
    return {
        draft_name(choice): ("float64", choice.draft.q.shape, np.ascontiguousarray(choice.draft.q).tobytes())
        for choice in request.choices
        if choice.draft.q is not None and drafts_on(choice)
    }


def draft_name(choice: Choice) -> str:
    """The name of the array with the distributions of a choice's draft."""
    return f"draft {choice.index}"
