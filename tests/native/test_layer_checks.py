"""Wrong calls of norm, activation and attention are named before any launch; the workspace is a function of the shapes.

Needs the library, not a GPU. Addresses are made up: nothing is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import NULL, replaced, view
from trtllm_replayssm.errors import CapacityError, ContractError, ReplaySSMError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

R, W, B, T, HQ, HKV, D, S, DEPTH = 6, 48, 3, 2, 8, 2, 64, 5, 128
ACT, F32, I32 = Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.INT32
MULTIPROCESSORS = 132


def norm_args() -> _abi.RmsNormArgs:
    rows = {name: view(ACT, R, W) for name in ("x", "residual", "sum", "out")}
    return _abi.RmsNormArgs(eps=1e-5, weight=view(F32, W), **rows)


def activation_args() -> _abi.ActivationArgs:
    groups = {name: view(ACT, R, 2, W) for name in ("x", "factor", "out")}
    return _abi.ActivationArgs(function=int(_abi.Function.SILU), **groups)


def cache_fields(rows: int = B, tokens: int = T, depth: int = DEPTH) -> dict[str, _abi.Tensor]:
    return {
        **{name: view(I32, rows) for name in ("slot", "start", "num_tokens")},
        "q": view(ACT, rows, tokens, HQ, D),
        **{name: view(ACT, S, HKV, depth, D) for name in ("keys", "values")},
    }


def input_args() -> _abi.AttentionInputsArgs:
    return _abi.AttentionInputsArgs(
        eps=1e-6,
        k=view(ACT, B, T, HKV, D),
        v=view(ACT, B, T, HKV, D),
        q_weight=view(F32, D),
        k_weight=view(F32, D),
        cosine=view(F32, DEPTH, 16),
        sine=view(F32, DEPTH, 16),
        q_out=view(ACT, B, T, HQ, D),
        **cache_fields(),
    )


def attention_args(rows: int = B, tokens: int = T, depth: int = DEPTH) -> _abi.AttentionArgs:
    return _abi.AttentionArgs(scale=0.125, out=view(ACT, rows, tokens, HQ, D), **cache_fields(rows, tokens, depth))


GOOD: dict[str, Callable[[], Any]] = {
    "rms_norm": norm_args,
    "activation": activation_args,
    "attention_inputs": input_args,
    "attention": attention_args,
}


def call(library: _abi.Library, operation: str, args: Any) -> None:
    if operation == "attention":
        library.attention(args, MULTIPROCESSORS, 1 << 20, 1 << 30, 0)
    else:
        getattr(library, operation)(args, 0)


# operation, what is replaced, by what, the error, words of its message
WRONG: list[tuple[str, str, Any, type[ReplaySSMError], str]] = [
    ("rms_norm", "x", view(F32, R, W), ContractError, "x: expected bfloat16, got float32"),
    ("rms_norm", "x", view(ACT, R, W, stride=(1, R)), ContractError, "x: expected stride 1 on axis 1"),
    ("rms_norm", "weight", view(F32, W + 1), ContractError, r"weight: expected \[48\], got \[49\]"),
    ("rms_norm", "residual", NULL, ContractError, "sum: expected null"),
    ("rms_norm", "sum", NULL, ContractError, "sum: expected rank 2, got 0"),
    ("rms_norm", "out", view(Dtype.FLOAT16, R, W), ContractError, "out: expected bfloat16, got float16"),
    ("rms_norm", "x", view(F32, 2, R, W + 1), ContractError, r"out: expected \[6, 49\], got \[6, 48\]"),
    ("rms_norm", "x", view(F32, 0, R, W), ContractError, r"x: parts: expected 1\.\.64, got 0"),
    ("rms_norm", "x", view(ACT, 2, R, W), ContractError, "x: expected rank 2, got 3"),
    ("rms_norm", "eps", float("nan"), ContractError, "eps: expected a number >= 0"),
    ("activation", "function", 4, ContractError, r"function: expected 1\.\.3, got 4"),
    ("activation", "factor", view(ACT, R, 1, W), ContractError, r"factor: expected \[6, 2, 48\], got \[6, 1, 48\]"),
    ("activation", "opening", view(F32, R + 1), ContractError, r"opening: expected \[6\], got \[7\]"),
    ("activation", "opening", view(ACT, R), ContractError, "opening: expected float32, got bfloat16"),
    ("activation", "out", view(ACT, R, 2, W, data=0), ContractError, "out: expected a pointer, got null"),
    ("attention_inputs", "slot", view(I32, B + 1), ContractError, r"slot: expected \[3\], got \[4\]"),
    ("attention_inputs", "start", view(Dtype.INT64, B), ContractError, "start: expected int32, got int64"),
    ("attention_inputs", "k", view(ACT, B, T, HKV + 1, D), ContractError, r"k: expected \[3, 2, 2, 64\]"),
    ("attention_inputs", "v", view(ACT, B, T, HKV, D, data=8), ContractError, "v: expected an address"),
    ("attention_inputs", "q_out", view(ACT, B, T, HQ, D, stride=(2000, 512, 64, 1)), ContractError, "q_out: expected"),
    ("attention_inputs", "k_weight", NULL, ContractError, "k_weight: expected both of the pair or none, got one"),
    ("attention_inputs", "cosine", NULL, ContractError, "sine: expected both of the pair or none, got one"),
    ("attention_inputs", "cosine", view(F32, DEPTH - 1, 16), ContractError, r"cosine: rows: expected 128\.\."),
    ("attention_inputs", "cosine", view(F32, DEPTH, 12), UnsupportedError, "cosine: R: expected a multiple of 8"),
    ("attention_inputs", "cosine", view(F32, DEPTH, 40), ContractError, r"cosine: R: expected 8\.\.32, got 40"),
    ("attention_inputs", "sine", view(F32, DEPTH, 8), ContractError, r"sine: expected \[128, 16\], got \[128, 8\]"),
    ("attention", "q", view(ACT, B, T, HQ, 60), UnsupportedError, "q: D: expected a multiple of 8, got 60"),
    ("attention", "q", view(ACT, B, T, HQ, 264), ContractError, r"q: D: expected 8\.\.256, got 264"),
    ("attention", "q", view(ACT, B, T, 7, D), ContractError, "keys: Hkv: expected a divisor of Hq = 7, got 2"),
    ("attention", "keys", view(ACT, S, HKV, DEPTH, 32), ContractError, r"keys: expected \[any, any, any, 64\]"),
    ("attention", "values", view(ACT, S, HKV, DEPTH - 1, D), ContractError, r"values: expected \[5, 2, 128, 64\]"),
    ("attention", "out", view(ACT, B, T, HQ, D, stride=(2000, 512, 64, 1)), ContractError, "out: expected stride"),
    ("attention", "num_tokens", NULL, ContractError, "num_tokens: expected rank 1, got 0"),
]


@pytest.mark.parametrize(("operation", "field", "value", "error", "words"), WRONG)
def test_a_wrong_argument_is_named(
    library: _abi.Library, operation: str, field: str, value: Any, error: type[ReplaySSMError], words: str
) -> None:
    with pytest.raises(error, match=f"rssm_{operation}: {words}"):
        call(library, operation, replaced(GOOD[operation](), field, value))


@pytest.mark.parametrize("operation", ["rms_norm", "activation", "attention_inputs"])
def test_structs_of_another_size_and_null_ones_are_refused(library: _abi.Library, operation: str) -> None:
    args, record, function = GOOD[operation](), _abi.ErrorRecord(), getattr(library._handle, f"rssm_{operation}")
    args.struct_size, args.abi_version = ctypes.sizeof(args) - 8, _abi.ABI_VERSION
    assert function(ctypes.byref(args), None, ctypes.byref(record)) == int(_abi.Status.ABI_MISMATCH)
    assert b"struct_size: expected" in record.message
    assert function(None, None, ctypes.byref(record)) == int(_abi.Status.INVALID_ARGUMENT)
    assert b"args: expected a pointer, got null" in record.message


def test_parts_of_a_product_come_with_a_residual(library: _abi.Library) -> None:
    norm = norm_args()
    norm.x, norm.residual, norm.sum = view(F32, 2, R, W), NULL, NULL
    with pytest.raises(ContractError, match="rssm_rms_norm: residual: expected rank 2, got 0"):
        library.rms_norm(norm, 0)


def test_empty_calls_do_nothing(library: _abi.Library) -> None:
    norm = norm_args()
    for name in ("x", "residual", "sum", "out"):
        setattr(norm, name, view(ACT, 0, W))
    library.rms_norm(norm, 0)
    library.attention(attention_args(rows=0), MULTIPROCESSORS, 0, 0, 0)


def test_keys_are_cut_only_where_rows_leave_multiprocessors_idle(library: _abi.Library) -> None:
    """Partial sums of 64 float32 channels and two float32 statistics, per part, token and query head."""
    row = (D + 2) * 4 * T * HQ
    assert library.attention_workspace(attention_args(rows=300, depth=4096), MULTIPROCESSORS) == 0
    assert library.attention_workspace(attention_args(rows=1, depth=127), MULTIPROCESSORS) == 0
    assert library.attention_workspace(attention_args(rows=1, depth=1024), MULTIPROCESSORS) == 16 * row
    assert library.attention_workspace(attention_args(rows=1, depth=1 << 20), MULTIPROCESSORS) == 64 * row
    assert library.attention_workspace(attention_args(rows=33, depth=1 << 20), MULTIPROCESSORS) == 2 * 33 * row


def test_more_query_rows_than_a_launch_counts_are_refused(library: _abi.Library) -> None:
    with pytest.raises(ContractError, match=r"q: B \* T \* Hq: expected 0\.\.1073741823, got 34358689800"):
        library.attention_workspace(attention_args(rows=65535, tokens=65535), MULTIPROCESSORS)


def test_a_workspace_that_is_too_small_is_refused(library: _abi.Library) -> None:
    args = attention_args(rows=1, depth=1024)
    size = library.attention_workspace(args, MULTIPROCESSORS)
    with pytest.raises(CapacityError, match=f"workspace: expected {size} bytes, got {size - 1}"):
        library.attention(args, MULTIPROCESSORS, 1 << 20, size - 1, 0)
    with pytest.raises(ContractError, match="workspace: expected a 16-byte aligned address"):
        library.attention(args, MULTIPROCESSORS, (1 << 20) + 8, size, 0)
    with pytest.raises(ContractError, match=r"multiprocessors: expected 1\.\."):
        library.attention(args, 0, 1 << 20, size, 0)
