"""Wrong calls of the draw and of the registers are named before any launch. Needs the library, not a GPU: addresses are
made up.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import NULL, view
from trtllm_replayssm.errors import CapacityError, ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

B, T, V, E, D, K, M = 3, 2, 100, 5, 4, 16, 50
F32, I32, I64 = Dtype.FLOAT32, Dtype.INT32, Dtype.INT64


def draw(**changed: Any) -> _abi.DrawArgs:
    fields = {
        "logits": view(F32, B, T, V), "row": view(I64, B), "tokens": view(I64, B, T), "finite": view(I32, B, T),
        **{name: view(I64, E) for name in ("length", "seed", "top_k")},
        **{name: view(F32, E) for name in ("temperature", "top_p", "min_p")},
    }  # fmt: skip
    return _abi.DrawArgs(**{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": view(Dtype.BFLOAT16, B, T, V)}, "logits: expected float32, got bfloat16"),
        ({"logits": view(F32, B, V)}, "logits: expected rank 3, got 2"),
        ({"logits": view(F32, B, T, V, stride=(2 * T * V, 2 * V, 2))}, "logits: expected stride 1"),
        ({"logits": view(F32, B, T, (1 << 20) + 1)}, "logits: V: expected 1..1048576, got 1048577"),
        ({"row": view(I32, B)}, "row: expected int64, got int32"),
        ({"seed": view(I64, E + 1)}, r"seed: expected \[5\], got \[6\]"),
        ({"top_p": view(I64, E)}, "top_p: expected float32, got int64"),
        ({"tokens": view(I64, B, T + 1)}, r"tokens: expected \[3, 2\]"),
        ({"finite": view(I32, B, T, data=0)}, "finite: expected a pointer, got null"),
        ({"row": NULL}, "row: expected rank 1, got 0"),
        ({"length": NULL}, "length: expected rank 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], message: str) -> None:
    library = _abi.Library(harness.LIBRARY)
    with pytest.raises(ContractError, match=f"rssm_draw: {message}"):
        library.draw(draw(**changed), 1 << 20, 1 << 30, 0)
    with pytest.raises(ContractError, match=f"rssm_draw_workspace: {message}"):
        library.draw_workspace(draw(**changed))


SETTINGS = ("row", "length", "seed", "temperature", "top_k", "top_p", "min_p")
PIECE_BYTES = 12  # what one block of the scan leaves


@pytest.mark.parametrize(
    ("rows", "width", "vocab", "blocks"),
    [(1, 1, 1, 1), (3, 2, 100, 6), (1, 1, 4096, 1), (1, 1, 4097, 2), (256, 1, 1 << 17, 4096), (99, 9, 1 << 17, 5346)],
)
def test_the_workspace_holds_what_the_blocks_of_the_scan_find(rows: int, width: int, vocab: int, blocks: int) -> None:
    """A block reads 4096 logits, and more where there are many; without settings it needs no less."""
    sizes = {"tokens": view(I64, rows, width), "finite": view(I32, rows, width), "row": view(I64, rows)}
    library, args = _abi.Library(harness.LIBRARY), draw(logits=view(F32, rows, width, vocab), **sizes)
    assert library.draw_workspace(args) == blocks * PIECE_BYTES
    for name in SETTINGS:
        setattr(args, name, NULL)
    assert library.draw_workspace(args) == blocks * PIECE_BYTES


def test_a_workspace_too_small_or_at_an_odd_address_is_refused() -> None:
    library = _abi.Library(harness.LIBRARY)
    needed = library.draw_workspace(draw())
    with pytest.raises(CapacityError, match=f"workspace: expected {needed} bytes, got {needed - 1}"):
        library.draw(draw(), 1 << 20, needed - 1, 0)
    with pytest.raises(ContractError, match="workspace: expected a 16-byte aligned address"):
        library.draw(draw(), (1 << 20) + 4, needed, 0)


@pytest.mark.parametrize("empty", [(0, T), (B, 0)])
def test_no_positions_launch_nothing(empty: tuple[int, int]) -> None:
    sizes = {"row": view(I64, empty[0]), "tokens": view(I64, *empty), "finite": view(I32, *empty)}
    library, args = _abi.Library(harness.LIBRARY), draw(logits=view(F32, *empty, V), **sizes)
    assert library.draw_workspace(args) == 0
    library.draw(args, 0, 0, 0)


def inputs(**changed: Any) -> _abi.StepInputsArgs:
    fields = {
        "slot": view(I32, B), "draft": view(I64, E, D), "ids": view(I64, B, T), "num_tokens": view(I32, B),
        "row": view(I64, B), **{name: view(I64, E) for name in ("last", "room", "draft_count")},
    }  # fmt: skip
    return _abi.StepInputsArgs(**{**fields, **changed})


def outcome(**changed: Any) -> _abi.StepOutcomeArgs:
    fields = {
        "slot": view(I32, B), "num_tokens": view(I32, B), "tokens": view(I64, B, T), "finite": view(I32, B, T),
        "draft": view(I64, E, D), "stop_ids": view(I64, E, K), "emitted": view(I32, B), "report": view(I64, B, T + 3),
        **{name: view(I64, E) for name in ("last", "length", "room")},
    }  # fmt: skip
    return _abi.StepOutcomeArgs(**{**fields, **changed})


def lookup(**changed: Any) -> _abi.PromptLookupArgs:
    fields = {
        "max_ngram": 3, "row": view(I64, B), "history": view(I64, E, M), "draft": view(I64, E, D),
        **{name: view(I64, E) for name in ("length", "room", "draft_count")},
    }  # fmt: skip
    return _abi.PromptLookupArgs(**{**fields, **changed})


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        ("step_inputs", inputs(slot=view(I64, B)), "slot: expected int32, got int64"),
        ("step_inputs", inputs(draft=view(I64, E, T - 2)), "draft: D: expected 1..1024, got 0"),
        ("step_inputs", inputs(ids=view(I64, B, T, stride=(1, B))), "ids: expected stride"),
        ("step_inputs", inputs(row=view(I64, B + 1)), r"row: expected \[3\]"),
        ("step_outcome", outcome(report=view(I64, B, T)), r"report: expected \[3, 5\], got \[3, 2\]"),
        ("step_outcome", outcome(count=view(I32, B)), "count: expected int64, got int32"),
        ("step_outcome", outcome(history=view(I64, E + 1, M)), r"history: expected \[5, any\]"),
        ("step_outcome", outcome(stop_ids=view(I64, K)), "stop_ids: expected rank 2, got 1"),
        ("prompt_lookup", lookup(max_ngram=0), "max_ngram: expected 1..16777216, got 0"),
        ("prompt_lookup", lookup(draft=view(I64, E, 0)), "draft: D: expected 1..1024, got 0"),
        ("prompt_lookup", lookup(room=view(I64, E, data=0)), "room: expected a pointer, got null"),
    ],
)
def test_a_wrong_register_is_named(call: str, args: Any, message: str) -> None:
    with pytest.raises(ContractError, match=f"rssm_{call}: {message}"):
        getattr(_abi.Library(harness.LIBRARY), call)(args, 0)
