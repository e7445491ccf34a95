"""Targets, versions and profiles: what is refused before anything is built, and why."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from trtllm_replayssm.builders.flavour import CURRENT, Flavour, FlavourName, load
from trtllm_replayssm.builders.profiles import (
    CONTEXT,
    DECODE_PHASE,
    GENERATION,
    PROMPT_PHASE,
    VERIFY,
    make_profiles,
    shape_range,
)
from trtllm_replayssm.errors import ConfigError, InvariantError, UnsupportedError

RTX, FULL = FlavourName.RTX, FlavourName.TENSORRT


@pytest.mark.parametrize(
    ("name", "target", "fp4", "fp8", "said"),
    [
        (RTX, "12.0", True, True, None),
        (RTX, "12.1", True, True, None),
        (RTX, "8.9", False, True, None),
        (RTX, "8.9", True, False, "12.x for the FP4 weights"),
        (RTX, "8.6", False, True, "8.9 or newer for the FP8 weights"),
        (RTX, "8.6", False, False, None),
        (RTX, CURRENT, True, True, None),
        (FULL, "10.0", True, True, None),
        (FULL, "9.0", True, False, "10.x or 12.x for the FP4 weights"),
    ],
)
def test_a_target_without_a_type_of_the_weights_is_refused_with_the_way_out(
    name: FlavourName, target: str, fp4: bool, fp8: bool, said: str | None
) -> None:
    flavour = Flavour(name, target, None)
    if said is None:
        flavour.require(fp4=fp4, fp8=fp8)
        return
    with pytest.raises(UnsupportedError, match=said) as caught:
        flavour.require(fp4=fp4, fp8=fp8)
    assert caught.value.hint is not None and "--weights bf16" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "version", "fits"),
    [
        (RTX, "1.7.0.1", True),
        (RTX, "1.6.1.120", False),
        (RTX, "2.0", True),
        (FULL, "11.0.0", True),
        (FULL, "10.16.1", False),
    ],
)
def test_a_library_without_the_layers_is_refused(
    name: FlavourName, version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name.value, SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    if fits:
        assert load(name, CURRENT).segmented == (name is RTX)
        return
    with pytest.raises(ConfigError, match="or newer"):
        load(name, CURRENT)


def profiles(max_step_tokens: int = 4, context_tokens: int = 32) -> dict[str, object]:
    return dict(
        make_profiles(
            max_batch=8, max_step_tokens=max_step_tokens, context_rows=1, context_tokens=context_tokens, max_seq_len=64
        )
    )


def test_three_profiles_in_a_fixed_order() -> None:
    made = make_profiles(max_batch=8, max_step_tokens=4, context_rows=1, context_tokens=32, max_seq_len=64)
    assert list(made) == [CONTEXT, GENERATION, VERIFY]
    assert made[GENERATION].tokens == (1, 1, 1) and made[VERIFY].tokens == (1, 4, 4)
    assert [p.phase for p in made.values()] == [PROMPT_PHASE, DECODE_PHASE, DECODE_PHASE]
    assert list(profiles(max_step_tokens=1)) == [CONTEXT, GENERATION]


def test_a_chunk_beyond_the_positions_of_a_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len = 64"):
        profiles(context_tokens=65)


def test_ranges_of_shapes_follow_the_symbols() -> None:
    made = make_profiles(max_batch=8, max_step_tokens=4, context_rows=1, context_tokens=32, max_seq_len=64)
    assert shape_range(("B", 2, "T"), made[VERIFY], 8) == [(1, 2, 1), (4, 2, 4), (8, 2, 4)]
    assert shape_range(("S", "C", "R", "K"), made[CONTEXT], 8) == [(1, 1, 2, 1), (8, 1, 2, 1), (8, 8, 2, 1)]
    with pytest.raises(InvariantError, match="symbols out of"):
        shape_range(("X",), made[CONTEXT], 8)
