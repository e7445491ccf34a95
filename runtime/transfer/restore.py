"""From a request's document back to the request: held to what a new request must be, and to itself.

An engine gives a request the states that it had; a document that asks for progress which its tokens and states do not
have would stop the engine or never end. So nothing is taken as it stands: settings pass the checks of a new request,
output follows from its tokens again, and what remains must be a state that a request can be in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trtllm_replayssm.errors import EngineMismatchError, RequestError
from trtllm_replayssm.runtime.sampling.logprobs import Logprob, TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import MAX_BIAS, MAX_SEED, SamplingParams
from trtllm_replayssm.runtime.scheduler.output import FinishReason
from trtllm_replayssm.runtime.scheduler.request import Choice, Request, RequestState
from trtllm_replayssm.runtime.session.base import RawArray
from trtllm_replayssm.runtime.speculative.drafter import Draft
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer
from trtllm_replayssm.runtime.transfer.document import CHOICE, PARAMS, REQUEST, draft_name
from trtllm_replayssm.runtime.transfer.parts import Part

_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "detokenize")


class Checks(Protocol):
    """What an engine holds new requests against, see `Intake`."""

    @property
    def vocab(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Prompt and output tokens of one request at most."""
        ...

    @property
    def max_choices(self) -> int:
        """Choices of one request at most."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What text follows from."""
        ...

    def request(
        self,
        request_id: int,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: float,
        seed: int | None,
        limit: int | None,
    ) -> Request:
        """A checked request. Raises RequestError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the engine that goes on can take. window: L; max_drafts: drafts of one step."""

    checks: Checks
    window: int
    max_drafts: int


def rebuild(part: Part, arrays: Mapping[str, RawArray], request_id: int, fit: Fit) -> tuple[Request, dict[int, int]]:
    """The request of a document, and by choice the tokens that its state has absorbed, where it has one.

    Raises CheckpointError naming what cannot be; EngineMismatchError for a request beyond this engine's limits,
    RequestError for one with stop strings where there is no tokenizer.
    """
    found = part.fields(REQUEST)
    checks = fit.checks
    prompt_ids = found["prompt_ids"].integers(0, checks.vocab - 1)
    params = _params(found["params"], checks.vocab)
    if params.stops and checks.tokenizer is None:
        raise RequestError("import_request", "stop", expected="stop_token_ids (there is no tokenizer)", got="strings")
    limit = found["limit"].integer(1, MAX_SEED if params.max_tokens is None else params.max_tokens)
    _require_room(part, len(prompt_ids) + limit, params.n, checks)
    seed = found["seed"].integer(0, MAX_SEED - 1)
    if params.seed not in (None, seed):
        raise found["seed"].refusal(f"{params.seed}, as in the settings")
    priority = found["priority"].number(0, 1)
    try:
        request = checks.request(request_id, prompt_ids, params, priority=priority, seed=seed, limit=limit)
    except RequestError as error:
        raise part.refusal(f"{error.argument}: {error.expected}", error.got) from error
    if list(request.prompt_ids) != prompt_ids:
        raise found["params"].refusal(f"truncate_prompt_tokens of at least {len(prompt_ids)}")
    request.prompt = None if found["prompt"].missing else found["prompt"].text()
    request.own_state = False
    parts = found["choices"].items(params.n, params.n)
    positions = {}
    for choice, saved in zip(request.choices, parts, strict=True):
        position = _restore_choice(choice, saved, arrays.get(draft_name(choice)), fit)
        if position is not None:
            positions[choice.index] = position
    request.cached_tokens = found["cached_tokens"].integer(0, min(request.choices[0].prefilled, len(prompt_ids) - 1))
    _require_progress(request, positions, parts)
    return request, positions


def _params(part: Part, vocab: int) -> SamplingParams:
    found = part.fields(PARAMS)
    values: dict[str, Any] = {name: value.scalar() for name, value in found.items() if name not in _LISTS}
    values |= {name: found[name].flag() for name in _FLAGS}
    for name, read in _LISTS.items():
        values[name] = None if found[name].missing else read(found[name], vocab)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise part.refusal(f"{error.argument}: {error.expected}", error.got) from error


def _stop(part: Part, vocab: int) -> str | tuple[str, ...]:
    return part.text() if part.is_text else tuple(item.text() for item in part.items())


def _stop_ids(part: Part, vocab: int) -> list[int]:
    return part.integers(0, vocab - 1)


def _bias(part: Part, vocab: int) -> dict[int, float]:
    pairs = [pair.items(2, 2) for pair in part.items()]
    bias = {token.integer(0, vocab - 1): value.number(-MAX_BIAS, MAX_BIAS) for token, value in pairs}
    if len(bias) != len(pairs):
        raise part.refusal("each token once")
    return bias


_LISTS = {"stop": _stop, "stop_token_ids": _stop_ids, "logit_bias": _bias}


def _require_room(part: Part, longest: int, choices: int, checks: Checks) -> None:
    if longest > checks.max_seq_len or choices > checks.max_choices:
        raise EngineMismatchError(
            "import_request", part.where,
            expected=f"at most max_seq_len = {checks.max_seq_len} tokens and {checks.max_choices} choices",
            got=f"{longest} tokens and {choices} choices",
        )  # fmt: skip


def _restore_choice(choice: Choice, part: Part, q: RawArray | None, fit: Fit) -> int | None:
    """Bring a new choice to where the document says it stands -> tokens that its state has absorbed, if it has one."""
    found = part.fields(CHOICE)
    length, vocab = len(choice.request.prompt_ids), fit.checks.vocab
    choice.prefilled = found["prefilled"].integer(0, length)
    choice.cuts = tuple(found["cuts"].integers(1, length - 1))
    if any(a >= b for a, b in zip(choice.cuts, choice.cuts[1:], strict=False)):
        raise found["cuts"].refusal("rising positions")
    _replay_output(choice, found, vocab)
    emitted = len(choice.output.token_ids)
    choice.pending = found["pending"].integer(0, min(fit.window, max(emitted - 1, 0)))
    running = choice.output.finish_reason is None and emitted > 0
    drafts = found["draft"].integers(0, vocab - 1, max(choice.output.room - 1, 0) if running else 0)
    if len(drafts) > fit.max_drafts:
        raise EngineMismatchError(
            "import_request", found["draft"].where, expected=f"at most {fit.max_drafts} drafts a step", got=len(drafts),
            hint="Continue it with the draft length it was started with",
        )  # fmt: skip
    choice.draft = Draft(tuple(drafts), None if q is None else _distributions(q, drafts, vocab, found["draft"]))
    return None if found["position"].missing else found["position"].integer(0, fit.checks.max_seq_len)


def _replay_output(choice: Choice, found: Mapping[str, Part], vocab: int) -> None:
    """Push the tokens again: text, scores, penalties and the end must come out as they were."""
    output, top = choice.output, choice.request.params.logprobs
    tokens = found["token_ids"].integers(0, vocab - 1, output.room)
    entries: Iterable[TokenLogprobs | None] = [None] * len(tokens)
    if top is not None:
        scored = found["logprobs"].items(len(tokens), len(tokens))
        entries = [_scores(entry, token, top, vocab) for entry, token in zip(scored, tokens, strict=True)]
    elif not found["logprobs"].missing:
        raise found["logprobs"].refusal("null: the settings ask for none")
    for token, entry in zip(tokens, entries, strict=True):
        if output.finish_reason is not None:
            raise found["token_ids"].refusal(f"no token after the end, {output.finish_reason.value}")
        choice.take(token, entry)
    if output.finish_reason is None and not found["error"].missing:
        output.finish(FinishReason.ERROR, found["error"].text())
    derived = None if output.finish_reason is None else output.finish_reason.value
    if found["finish_reason"].scalar() != derived or (found["error"].missing is not (output.error is None)):
        raise found["finish_reason"].refusal(f"{derived}, as the tokens and the error say")
    if output.finish_reason is not None:
        choice.state = RequestState.FINISHED


def _scores(part: Part, token: int, top: int, vocab: int) -> TokenLogprobs:
    """One token's log-probabilities: its own first, then the best."""
    entries: dict[int, Logprob] = {}
    for item in part.items(1, 1 + top):
        identity, value, rank = item.items(3, 3)
        entries[identity.integer(0, vocab - 1)] = Logprob(value.number(-math.inf, 0.0), rank.integer(1, vocab))
    if next(iter(entries)) != token:
        raise part.refusal(f"token {token} first")
    return TokenLogprobs(entries)


def _distributions(q: RawArray, drafts: Sequence[int], vocab: int, part: Part) -> np.ndarray[Any, np.dtype[np.float64]]:
    kind, shape, data = q
    if kind != "float64" or shape != (len(drafts), vocab) or not drafts:
        raise part.refusal(f"as many drafts as rows of {vocab} float64 probabilities", f"{len(drafts)}, {kind} {shape}")
    rows = np.frombuffer(data, np.float64).reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = rows.sum(axis=1)
    chosen = rows[np.arange(len(drafts)), list(drafts)]
    if not (rows.min() >= 0 and np.abs(sums - 1).max() < 1e-6 and chosen.min() > 0):  # NaN fails each
        raise part.refusal("distributions that the drafts were drawn from", "others")
    return rows


def _require_progress(request: Request, positions: Mapping[int, int], parts: Sequence[Part]) -> None:
    """Raise CheckpointError unless the choices stand where the choices of one request can stand together."""
    length = len(request.prompt_ids)
    started = request.choices[0].prefilled == length
    for choice, part in zip(request.choices, parts, strict=True):
        ended, emitted = choice.output.finish_reason is not None, len(choice.output.token_ids)
        position = positions.get(choice.index)
        if started and ended:
            good = choice.prefilled == length and position is None
        elif started:
            good = choice.prefilled == length and emitted > 0 and position == length + emitted - 1
        elif choice.index == 0:  # a slot may have been given before its first chunk ran
            absorbed = 0 if position is None else position
            good = not ended and not emitted and absorbed == choice.prefilled
        else:
            good = not ended and not emitted and not choice.prefilled and position is None
        if not good:
            raise part.refusal(
                "progress and a state that belong together",
                f"{choice.prefilled} of {length} prompt tokens, {emitted} emitted, a state of {position} tokens",
            )
    if request.finished:
        raise parts[0].refusal("a choice that goes on", "a request whose choices have all ended")
