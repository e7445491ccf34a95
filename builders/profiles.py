"""Optimisation profiles as pure functions of the build's limits: context, generation (T = 1) and verify (1..T_max)."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_replayssm.bindings import Dim
from trtllm_replayssm.errors import ConfigError, InvariantError
from trtllm_replayssm.manifest import CONTEXT, GENERATION, VERIFY, Profile

DECODE_PHASE, PROMPT_PHASE = 1, 2


def make_profiles(
    *, max_batch: int, max_step_tokens: int, context_rows: int, context_tokens: int, max_seq_len: int
) -> dict[str, Profile]:
    """The profiles in the order of their numbers; verify is left out where a step never has drafts.

    Generation fixes T at 1: the compiler has special kernels for one query, and they are used only where no profile
    shape allows more.
    """
    if context_tokens > max_seq_len:
        raise ConfigError(
            "build", "context_tokens", expected=f"at most max_seq_len = {max_seq_len}", got=context_tokens
        )
    rows, typical = (1, max(1, max_batch // 2), max_batch), max(1, context_tokens // 2)
    profiles = {
        CONTEXT: Profile(
            rows=(1, 1, context_rows), tokens=(1, typical, context_tokens), selected=(1, 1, 1), phase=PROMPT_PHASE
        ),
        GENERATION: Profile(rows=rows, tokens=(1, 1, 1), selected=(1, 1, 1), phase=DECODE_PHASE),
    }
    if max_step_tokens > 1:
        span = (1, max_step_tokens, max_step_tokens)
        profiles[VERIFY] = Profile(rows=rows, tokens=span, selected=span, phase=DECODE_PHASE)
    return profiles


def shape_range(dims: Sequence[Dim], profile: Profile, slots: int) -> list[tuple[int, ...]]:
    """Smallest, typical and largest shape of a tensor in a profile; `slots` is the extent of the pools."""
    ranges = {
        "B": profile.rows, "T": profile.tokens, "K": profile.selected, "S": (1, slots, slots),
        "C": (1, 1, slots), "R": (profile.phase,) * 3,
    }  # fmt: skip
    for dim in dims:
        if isinstance(dim, str) and dim not in ranges:
            raise InvariantError("shape_range", "dims", expected=f"symbols out of {sorted(ranges)}", got=dim)
    return [tuple(ranges[dim][i] if isinstance(dim, str) else dim for dim in dims) for i in range(3)]
