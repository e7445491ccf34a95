"""Wrong calls of the baselines are named before any launch; their launch choice is a printable function of the sizes.

Needs the library, not a GPU. Addresses are made up: nothing is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import view
from trtllm_replayssm.errors import ContractError, ReplaySSMError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

B, T, H, G, P, N, S, E, R = 3, 2, 8, 2, 64, 128, 5, 3, 2
ACT, F32, I32 = Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.INT32
MAMBA2, GDN = int(_abi.Kind.MAMBA2), int(_abi.Kind.GDN)


def step_fields(kind: int, rows: int = B, tokens: int = T) -> dict[str, Any]:
    fields = {
        "kind": kind, "slot": view(I32, rows), "num_tokens": view(I32, rows),
        "value": view(ACT, rows, tokens, H, P), "k": view(ACT, rows, tokens, G, N), "q": view(ACT, rows, tokens, G, N),
        "out": view(ACT, rows, tokens, H, P),
    }  # fmt: skip
    if kind == MAMBA2:
        return fields | {"dt": view(F32, rows, tokens, H), "a": view(F32, H), "skip": view(F32, H)}
    return fields | {"log_decay": view(F32, rows, tokens, H), "beta": view(F32, rows, tokens, H)}


def conventional(kind: int = MAMBA2, **changed: Any) -> _abi.ConventionalArgs:
    fields = step_fields(kind) | {"entry": view(I32, S), "state": view(F32, S, E, H, P * N)}
    return _abi.ConventionalArgs(**{**fields, **changed})


def recovery(kind: int = MAMBA2, **changed: Any) -> _abi.RecoveryArgs:
    states = {name: view(F32, S, H, P * N) for name in ("source", "recovered", "end")}
    cached = {"cached_value": view(ACT, B, R, H, P), "cached_k": view(ACT, B, R, G, N), "replayed": view(I32, B)}
    if kind == MAMBA2:
        cached["cached_dt"] = view(F32, B, R, H)
    else:
        cached |= {"cached_log_decay": view(F32, B, R, H), "cached_beta": view(F32, B, R, H)}
    return _abi.RecoveryArgs(**{**step_fields(kind), **states, **cached, **changed})


BAD_STEPS: list[tuple[str, dict[str, Any], type[ReplaySSMError], str]] = [
    ("rank", {"value": view(ACT, B, T, H * P)}, ContractError, "value: expected rank 4, got 3"),
    ("act", {"k": view(Dtype.FLOAT16, B, T, G, N)}, ContractError, "k: expected bfloat16, got float16"),
    ("state size", {"k": view(ACT, B, T, G, 64)}, ContractError, r"k: expected \[3, 2, any, 128\]"),
    ("query", {"q": view(ACT, B, T, 1, N)}, ContractError, r"q: expected \[3, 2, 2, 128\], got \[3, 2, 1, 128\]"),
    ("groups", {"k": view(ACT, B, T, 3, N), "q": view(ACT, B, T, 3, N)}, ContractError, "that divide the 8 heads"),
    ("rows", {"slot": view(I32, B + 1)}, ContractError, r"slot: expected \[3\], got \[4\]"),
    ("dt", {"dt": view(ACT, B, T, H)}, ContractError, "dt: expected float32, got bfloat16"),
    ("null", {"out": view(ACT, B, T, H, P, data=0)}, ContractError, "out: expected a pointer, got null"),
    ("address", {"k": view(ACT, B, T, G, N, data=(1 << 20) + 8)}, ContractError, "k: expected an address"),
    ("stride", {"out": view(ACT, B, T, H, P, stride=(9999, 2048, 128, 2))}, ContractError, "out: expected stride 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), [c[1:] for c in BAD_STEPS], ids=[c[0] for c in BAD_STEPS])
@pytest.mark.parametrize("make", [conventional, recovery], ids=["conventional", "recovery"])
def test_a_wrong_input_is_named(
    library: _abi.Library, make: Callable[..., Any], changed: dict[str, Any], error: type[ReplaySSMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(library, make(**changed))


def call(library: _abi.Library, args: Any) -> None:
    run = library.recovery_step if isinstance(args, _abi.RecoveryArgs) else library.conventional_update
    run(args, 0)


@pytest.mark.parametrize("kind", [MAMBA2, GDN])
def test_states_must_fit_the_step(library: _abi.Library, kind: int) -> None:
    with pytest.raises(ContractError, match=r"max\(E - 1, 1\) = 1, got 2"):
        call(library, conventional(kind, state=view(F32, S, 2, H, P * N)))
    with pytest.raises(ContractError, match=r"entry: expected \[5\]"):
        call(library, conventional(kind, entry=view(I32, S + 1)))
    with pytest.raises(ContractError, match="state: expected float32, got float16"):
        call(library, conventional(kind, state=view(Dtype.FLOAT16, S, E, H, P * N)))
    with pytest.raises(ContractError, match=r"end: expected \[5, 8, 8192\]"):
        call(library, recovery(kind, end=view(F32, S + 1, H, P * N)))
    with pytest.raises(ContractError, match=r"cached_k: expected \[3, 2, 2, 128\]"):
        call(library, recovery(kind, cached_k=view(ACT, B, R, 1, N)))
    with pytest.raises(ContractError, match=r"replayed: expected rank 1"):
        call(library, recovery(kind, replayed=_abi.Tensor()))


@pytest.mark.parametrize("kind", [MAMBA2, GDN])
def test_recovery_steps_are_of_bfloat16(library: _abi.Library, kind: int) -> None:
    """Unlike conventional steps: nobody measures the schemes with another type."""
    half = {name: view(Dtype.FLOAT16, B, T, H, P) for name in ("value", "out")}
    with pytest.raises(ContractError, match="value: expected bfloat16, got float16"):
        call(library, recovery(kind, **half))


def test_other_head_sizes_and_kinds_are_refused(library: _abi.Library) -> None:
    odd = {"value": view(ACT, B, T, H, 24), "out": view(ACT, B, T, H, 24)}
    with pytest.raises(UnsupportedError, match="a multiple of 16, got 24"):
        call(library, conventional(state=view(F32, S, E, H, 24 * N), **odd))
    args = conventional()
    args.kind = 3
    with pytest.raises(ContractError, match="kind"):
        call(library, args)


BAD_COMMITS: list[tuple[str, dict[str, Any], str]] = [
    ("entries", {"entries": 1}, "entries: expected 2..17, got 1"),
    ("rows", {"accepted": view(I32, B + 1)}, r"accepted: expected \[3\], got \[4\]"),
    ("type", {"num_tokens": view(Dtype.INT64, B)}, "num_tokens: expected int32, got int64"),
    ("slots", {"position": view(I32, S + 1)}, r"position: expected \[5\], got \[6\]"),
    ("stride", {"entry": view(I32, S, stride=(2,))}, "entry: expected"),
]


@pytest.mark.parametrize(("changed", "message"), [c[1:] for c in BAD_COMMITS], ids=[c[0] for c in BAD_COMMITS])
def test_a_wrong_commit_is_named(library: _abi.Library, changed: dict[str, Any], message: str) -> None:
    fields = {name: view(I32, B) for name in ("slot", "num_tokens", "accepted")}
    fields |= {"entry": view(I32, S), "position": view(I32, S)}
    with pytest.raises(ContractError, match=message):
        library.conventional_commit(_abi.ConventionalCommitArgs(**{"entries": E, **fields, **changed}), 0)


def test_an_empty_batch_needs_no_device(library: _abi.Library) -> None:
    fields = step_fields(GDN, rows=0)
    library.conventional_update(_abi.ConventionalArgs(**fields, state=view(F32, S, E, H, P * N)), 0)
    library.recovery_step(_abi.RecoveryArgs(**fields, source=view(F32, S, H, P * N)), 0)
    none = {name: view(I32, 0) for name in ("slot", "num_tokens", "accepted")}
    library.conventional_commit(
        _abi.ConventionalCommitArgs(entries=E, **none, entry=view(I32, S), position=view(I32, S)), 0
    )


def test_structs_of_another_size_are_refused(library: _abi.Library) -> None:
    args, record = _abi.ConventionalArgs(), _abi.ErrorRecord()
    status = library._handle.rssm_conventional_update(ctypes.byref(args), None, ctypes.byref(record))
    assert status == _abi.Status.ABI_MISMATCH and b"struct_size" in record.message


@pytest.mark.parametrize(
    ("kind", "rows", "tokens", "multiprocessors", "expected"),
    [
        (MAMBA2, 1, 1, 132, "conventional: 32 CTAs of 4 warps, 4 state rows a warp"),
        (MAMBA2, 512, 1, 132, "conventional: 32768 CTAs of 1 warps, 8 state rows a warp"),
        (GDN, 512, 1, 4096, "conventional: 16384 CTAs of 4 warps, 4 state rows a warp"),
        (MAMBA2, 3, 2, 132, "conventional: 12 CTAs of 8 warps, 16 state rows a warp"),
        (GDN, 3, 2, 132, "conventional: 192 CTAs of 1 warps, 8 state rows a warp"),
    ],
)
def test_the_launch_choice_is_printable_without_a_device(
    library: _abi.Library, kind: int, rows: int, tokens: int, multiprocessors: int, expected: str
) -> None:
    fields = step_fields(kind, rows, tokens)
    args = _abi.ConventionalArgs(**fields, state=view(F32, S, E, H, P * N))
    assert library.conventional_launch_text(args, multiprocessors) == expected
    with pytest.raises(ContractError, match="multiprocessors"):
        library.conventional_launch_text(args, 0)
