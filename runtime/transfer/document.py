"""A request as a JSON document and arrays, and back. Text, stop state and penalties follow from its tokens again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.runtime.sampling.logprobs import Logprob, TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules, FinishReason
from trtllm_replayssm.runtime.scheduler.request import Choice, Request, RequestState
from trtllm_replayssm.runtime.session.base import RawArray
from trtllm_replayssm.runtime.speculative.drafter import Draft
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer


def describe(request: Request) -> dict[str, Any]:
    """Everything of a request but the state of its slots. Raises UnsupportedError for one that follows a grammar."""
    if request.params.logits_mask is not None:
        raise UnsupportedError("export_request", "logits_mask", expected="a request without one", got="a grammar")
    params = {field.name: getattr(request.params, field.name) for field in fields(SamplingParams)}
    del params["logits_mask"]
    params["logit_bias"] = None if request.params.logit_bias is None else sorted(request.params.logit_bias.items())
    for name in ("stop", "stop_token_ids"):
        if params[name] is not None and not isinstance(params[name], str):
            params[name] = list(params[name])
    rules = request.rules
    return {
        "prompt": request.prompt,
        "prompt_ids": list(request.prompt_ids),
        "params": params,
        "priority": request.priority,
        "cached_tokens": request.cached_tokens,
        "rules": {"end_ids": sorted(rules.end_ids), "stop_ids": sorted(rules.stop_ids), "limit": rules.limit},
        "choices": [_describe_choice(choice) for choice in request.choices],
    }


def _describe_choice(choice: Choice) -> dict[str, Any]:
    output, reason = choice.output, choice.output.finish_reason
    scored = choice.request.params.logprobs is not None
    return {
        "seed": choice.seed,
        "prefilled": choice.prefilled,
        "pending": choice.pending,
        "cuts": list(choice.cuts),
        "token_ids": list(output.token_ids),
        "logprobs": [_describe_logprobs(entry) for entry in output.logprobs] if scored else None,
        "finish_reason": None if reason is None else reason.value,
        "error": output.error,
        "draft": list(choice.draft.tokens),
    }


def _describe_logprobs(entry: TokenLogprobs) -> list[list[Any]]:
    return [[token, *asdict(logprob).values()] for token, logprob in entry.items()]


def draft_arrays(request: Request) -> dict[str, RawArray]:
    """Distributions that drafts were drawn from, by choice."""
    return {
        f"draft {choice.index}": ("float64", choice.draft.q.shape, np.ascontiguousarray(choice.draft.q).tobytes())
        for choice in request.choices
        if choice.draft.q is not None
    }


def rebuild(
    document: Mapping[str, Any], arrays: Mapping[str, RawArray], request_id: int, tokenizer: Tokenizer | None
) -> Request:
    """The request of a document. KeyError, TypeError or ValueError (our own included) mean that it is none."""
    values = dict(document["params"])
    bias = values.pop("logit_bias")
    values["logit_bias"] = None if bias is None else {int(token): value for token, value in bias}
    params = SamplingParams(**values)
    rules = document["rules"]
    request = Request(
        request_id,
        document["prompt_ids"],
        params,
        seed=0,
        rules=EndRules(frozenset(rules["end_ids"]), frozenset(rules["stop_ids"]), rules["limit"]),
        tokenizer=tokenizer,
        prompt=document["prompt"],
        priority=document["priority"],
    )
    request.cached_tokens = document["cached_tokens"]
    for choice, saved in zip(request.choices, document["choices"], strict=True):
        _restore_choice(choice, saved, arrays.get(f"draft {choice.index}"))
    return request


def _restore_choice(choice: Choice, saved: Mapping[str, Any], q: RawArray | None) -> None:
    choice.seed, choice.prefilled, choice.pending = saved["seed"], saved["prefilled"], saved["pending"]
    choice.cuts = tuple(saved["cuts"])
    scores = saved["logprobs"] or [None] * len(saved["token_ids"])
    for token, entry in zip(saved["token_ids"], scores, strict=True):
        choice.output.push(token, None if entry is None else {t: Logprob(p, rank) for t, p, rank in entry})
        choice.history.add(token)
    if saved["finish_reason"] is not None:
        choice.output.finish(FinishReason(saved["finish_reason"]), saved["error"])
        choice.state = RequestState.FINISHED
    distribution = None if q is None else np.frombuffer(q[2], np.float64).reshape(q[1])
    choice.draft = Draft(tuple(saved["draft"]), distribution)
