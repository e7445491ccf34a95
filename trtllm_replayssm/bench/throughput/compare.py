"""Whether two runs generated the same tokens: a first difference counts unless the two tokens are nearly a tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.sampling.params import SamplingParams

_LOOKED_AT = 20  # most likely tokens among which the two must be for a tie

Margin = Callable[[Sequence[int], int, int], float]
"""margin(ids, a, b): how far apart the logits of tokens a and b are behind `ids`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a request's outputs differ, and the margin between the two there, in logits."""

    request: int
    token: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Requests by what came out. ties: first differences below the noise; differences: those above it."""

    equal: int
    ties: tuple[Difference, ...]
    differences: tuple[Difference, ...]

    @property
    def green(self) -> bool:
        """Whether nothing differs beyond noise."""
        return not self.differences

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "green": self.green, "equal": self.equal, "near_ties": len(self.ties), "different": len(self.differences),
            "first_differences": [
                {"request": d.request, "token": d.token, "margin": d.margin} for d in (*self.differences, *self.ties)
            ],
        }  # fmt: skip


def compare(
    ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput], margin: Margin, noise: float
) -> Comparison:
    """Outputs of the same requests in the same order; noise: margins in logits below which a difference is a tie."""
    found: list[Difference] = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        first, second = one.outputs[0].token_ids, other.outputs[0].token_ids
        place = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if place is not None:
            ids = [*one.prompt_token_ids, *first[:place]]
            found.append(Difference(number, place, margin(ids, first[place], second[place])))
        elif len(first) != len(second):
            found.append(Difference(number, min(len(first), len(second)), float("inf")))
    ties = tuple(d for d in found if d.margin < noise)
    return Comparison(
        equal=len(ours) - len(found), ties=ties, differences=tuple(d for d in found if not d.margin < noise)
    )


def margin_of(llm: LLM) -> Margin:
    """Margins by a model that runs: the ids as a prompt, one token, its most likely candidates."""

    def margin(ids: Sequence[int], a: int, b: int) -> float:
        params = SamplingParams(max_tokens=1, logprobs=_LOOKED_AT, ignore_eos=True)
        output = llm.generate(list(ids), params, use_tqdm=False)
        assert isinstance(output, RequestOutput) and output.outputs[0].logprobs is not None
        found = output.outputs[0].logprobs[0]
        return abs(found[a].logprob - found[b].logprob) if a in found and b in found else float("inf")

    return margin
