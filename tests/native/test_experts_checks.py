"""Wrong calls of routing, routed experts and packed products are named before any launch. Needs the library, not a GPU.

Each operation has one good call; every case spoils one argument of it. Addresses are made up: nothing is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import NULL, replaced, view
from trtllm_replayssm.errors import CapacityError, ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

N, X, INNER, E, K = 5, 64, 40, 6, 2


def packed(experts: int, rows: int, columns: int, parts: int) -> _abi.PackedWeights:
    shape = (experts, -(-rows * parts // 128), -(-columns // 128))
    return _abi.PackedWeights(
        rows=rows, columns=columns, parts=parts, data=view(Dtype.FLOAT4_E2M1, *shape, 16384),
        block_scale=view(Dtype.FLOAT8_E4M3, *shape, 1024), factor=view(Dtype.FLOAT32, experts, parts, 1),
    )  # fmt: skip


def experts_args() -> _abi.ExpertsArgs:
    return _abi.ExpertsArgs(
        up=packed(E, INNER, X, 2), down=packed(E, X, INNER, 1), x=view(Dtype.BFLOAT16, N, X),
        ids=view(Dtype.INT32, N, K), weights=view(Dtype.FLOAT32, N, K), out=view(Dtype.BFLOAT16, N, X),
    )  # fmt: skip


def linear_args() -> _abi.PackedLinearArgs:
    return _abi.PackedLinearArgs(
        weight=packed(1, INNER, X, 1), x=view(Dtype.BFLOAT16, N, X), out=view(Dtype.BFLOAT16, N, INNER)
    )


def route_args() -> _abi.RouteArgs:
    return _abi.RouteArgs(
        router=int(_abi.RouterKind.SIGMOID), groups=2, topk_group=1, norm_topk=1, scaling=1.0,
        logits=view(Dtype.FLOAT32, N, 3, E), bias=view(Dtype.FLOAT32, E), slot=view(Dtype.INT32, N),
        num_tokens=view(Dtype.INT32, N), ids=view(Dtype.INT32, N * 3, K), weights=view(Dtype.FLOAT32, N * 3, K),
    )  # fmt: skip


GOOD: dict[str, Callable[[], Any]] = {"experts": experts_args, "packed_linear": linear_args, "route": route_args}
ODD = view(Dtype.BFLOAT16, N, X, data=(1 << 20) + 2)

# operation, what is replaced ("up.rows" is a field of a field), by what, words of the message
WRONG: list[tuple[str, str, Any, str]] = [
    ("experts", "x", view(Dtype.FLOAT16, N, X), "x: expected bfloat16, got float16"),
    ("experts", "x", view(Dtype.BFLOAT16, N, X + 8), r"up: columns: expected 72\.\.72, got 64"),
    ("experts", "x", ODD, "x: expected an address that is a multiple of 16 bytes"),
    ("experts", "ids", view(Dtype.INT64, N, K), "ids: expected int32, got int64"),
    ("experts", "ids", view(Dtype.INT32, N + 1, K), r"ids: expected \[5, any\], got \[6, 2\]"),
    ("experts", "ids", view(Dtype.INT32, N, 0), r"ids: k: expected 1\.\.6, got 0"),
    ("experts", "ids", view(Dtype.INT32, N, E + 1), r"ids: k: expected 1\.\.6, got 7"),
    ("experts", "weights", view(Dtype.FLOAT32, N, K + 1), r"weights: expected \[5, 2\], got \[5, 3\]"),
    ("experts", "out", view(Dtype.BFLOAT16, N, X + 8), r"out: expected \[5, 64\], got \[5, 72\]"),
    ("experts", "pass_tokens", 24, "pass_tokens: expected 0, 16, 32 or 64, got 24"),
    ("experts", "up.parts", 3, r"up: parts: expected 1\.\.2, got 3"),
    ("experts", "up.columns", 60, "up: columns: expected a multiple of 8, got 60"),
    ("experts", "up.rows", 72, r"up: data: expected \[6, 2, 1, 16384\], got \[6, 1, 1, 16384\]"),
    ("experts", "up.data", view(Dtype.FLOAT32, E, 1, 1, 16384), "up: data: expected float4_e2m1, float8_e4m3 or"),
    ("experts", "up.data", view(Dtype.FLOAT8_E4M3, E, 1, 1, 16384), "up: block_scale: expected an absent tensor"),
    ("experts", "up.block_scale", NULL, "up: block_scale: expected rank 4, got 0"),
    ("experts", "up.factor", view(Dtype.FLOAT32, E, 2, 3), "up: factor: expected 1 or 40 factors a part, got 3"),
    ("experts", "down.rows", 60, r"out: expected \[5, 60\], got \[5, 64\]"),
    ("experts", "down.columns", 48, r"down: columns: expected 40\.\.40, got 48"),
    ("experts", "down.data", view(Dtype.FLOAT4_E2M1, E, 1, 1, 16384, data=8), "down: data: expected addresses"),
    ("packed_linear", "weight", packed(1, INNER + 1, X, 1), "weight: rows: expected an even number, got 41"),
    ("packed_linear", "weight", packed(2, INNER, X, 1), r"weight: data: expected \[1, 1, 1, 16384\], got \[2,"),
    ("packed_linear", "out", view(Dtype.BFLOAT16, N, INNER, data=2), "out: expected address and rows of whole 4 bytes"),
    ("packed_linear", "out", view(Dtype.BFLOAT16, N, X), r"out: expected \[5, 40\], got \[5, 64\]"),
    ("route", "router", 2, r"router: expected 0\.\.1, got 2"),
    ("route", "groups", 4, "groups: expected a divisor of E = 6, got 4"),
    ("route", "groups", 0, r"groups: expected 1\.\.32, got 0"),
    ("route", "topk_group", 3, r"topk_group: expected 1\.\.2, got 3"),
    ("route", "norm_topk", 2, r"norm_topk: expected 0\.\.1, got 2"),
    ("route", "router", int(_abi.RouterKind.SOFTMAX), r"groups: expected 1\.\.1, got 2"),
    ("route", "logits", view(Dtype.BFLOAT16, N, 3, E), "logits: expected float32, got bfloat16"),
    ("route", "bias", view(Dtype.FLOAT32, E + 1), r"bias: expected \[6\], got \[7\]"),
    ("route", "num_tokens", NULL, "num_tokens: expected rank 1, got 0"),
    ("route", "ids", view(Dtype.INT32, N, K), r"ids: expected \[15, any\], got \[5, 2\]"),
    ("route", "ids", view(Dtype.INT32, N * 3, E + 1), r"ids: k: expected 1\.\.6, got 7"),
    ("route", "weights", view(Dtype.FLOAT32, N * 3, K + 1), r"weights: expected \[15, 2\], got \[15, 3\]"),
]  # fmt: skip


def call(library: _abi.Library, operation: str, args: Any) -> None:
    if operation == "experts":
        library.experts(args, 1 << 20, library.experts_workspace(args), 0)
    else:
        getattr(library, operation)(args, 0)


@pytest.mark.parametrize(("operation", "field", "value", "message"), WRONG)
def test_a_wrong_argument_is_named(library: _abi.Library, operation: str, field: str, value: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        call(library, operation, replaced(GOOD[operation](), field, value))


def test_a_workspace_that_is_too_small_is_refused(library: _abi.Library) -> None:
    args = experts_args()
    size = library.experts_workspace(args)
    assert size > N * K * (INNER + X) * 2
    with pytest.raises(CapacityError, match=f"workspace: expected {size} bytes, got {size - 1}"):
        library.experts(args, 1 << 20, size - 1, 0)


def layer_workspace(library: _abi.Library, tokens: int, pass_tokens: int, *, inner: int = 128, width: int = 256) -> int:
    args = _abi.ExpertsArgs(
        pass_tokens=pass_tokens, up=packed(E, inner, width, 2), down=packed(E, width, inner, 1),
        x=view(Dtype.BFLOAT16, tokens, width), ids=view(Dtype.INT32, tokens, K),
        weights=view(Dtype.FLOAT32, tokens, K), out=view(Dtype.BFLOAT16, tokens, width),
    )  # fmt: skip
    return library.experts_workspace(args)


def test_the_lengths_of_passes_need_as_much_workspace_as_any_step(library: _abi.Library) -> None:
    """What the TensorRT plugin asks for: the largest of all, at the most tokens, serves every number of tokens."""
    for most in (4, 24, 50, 60, 200, 1000):
        reserved = max(layer_workspace(library, most, tokens) for tokens in (16, 32, 64))
        assert all(layer_workspace(library, tokens, 0) <= reserved for tokens in range(1, most + 1))


def test_tokens_are_ordered_from_passes_of_32_on(library: _abi.Library) -> None:
    """Where both products have whole steps of a warpgroup; `chosen`: 2 x tokens / 6 an expert, more than 6 or fewer."""
    tokens, width = 50, 256
    copy = tokens * width * 2
    for inner, ordered in ((128, True), (384, True), (192, False), (64, False)):
        few, *more = (layer_workspace(library, tokens, most, inner=inner) for most in (16, 32, 64, 0))
        assert [needed > few + copy // 2 for needed in more] == [ordered] * 3, inner
    assert layer_workspace(library, 18, 0) == layer_workspace(library, 18, 16), "6 an expert"
    assert layer_workspace(library, 19, 0) == layer_workspace(library, 19, 32), "7 an expert"


@pytest.mark.parametrize("operation", list(GOOD))
def test_no_tokens_are_no_work(library: _abi.Library, operation: str) -> None:
    """The good calls pass every check: without tokens they return before they look for a device."""
    args = GOOD[operation]()
    for name in ("x", "ids", "weights", "out", "logits", "slot", "num_tokens"):
        if hasattr(args, name):
            getattr(args, name).shape[0] = 0
    call(library, operation, args)


def test_struct_sizes_are_checked(library: _abi.Library) -> None:
    record = _abi.ErrorRecord()
    args = linear_args()
    args.struct_size = ctypes.sizeof(args) - 8
    args.abi_version = _abi.ABI_VERSION
    status = library._handle.rssm_packed_linear(ctypes.byref(args), None, ctypes.byref(record))
    assert status == _abi.Status.ABI_MISMATCH and b"struct_size" in record.message
