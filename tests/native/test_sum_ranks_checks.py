"""Wrong calls of the sum over ranks are named before any launch.

Needs the library, not a GPU. Addresses are made up: nothing is read.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import NULL, replaced, view
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

R, W, CAPACITY = 6, 48, 16
ACT, F32, I32 = Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.INT32
ADDRESSES = tuple((rank + 1) << 20 for rank in range(_abi.MAX_RANKS))


def inboxes(*addresses: int) -> Any:
    return (ctypes.c_void_p * _abi.MAX_RANKS)(*addresses)


def good() -> _abi.SumRanksArgs:
    rows = {name: view(ACT, R, W) for name in ("x", "residual", "sum", "out")}
    return _abi.SumRanksArgs(
        eps=1e-6, rank=1, ranks=2, capacity=CAPACITY, patience_ns=1, inbox=inboxes(*ADDRESSES[:2]), gave_up=1 << 20,
        weight=view(F32, W), turn=view(I32, CAPACITY), **rows,
    )  # fmt: skip


WRONG: list[tuple[str, Any, str]] = [
    ("ranks", 1, r"ranks: expected 2\.\.8, got 1"),
    ("ranks", 9, r"ranks: expected 2\.\.8, got 9"),
    ("rank", 2, r"rank: expected 0\.\.1, got 2"),
    ("rank", -1, r"rank: expected 0\.\.1, got -1"),
    ("capacity", R - 1, r"x: R: expected 0\.\.5, got 6"),
    ("patience_ns", 0, r"patience_ns: expected 1\.\."),
    ("inbox", inboxes(ADDRESSES[0]), r"inbox: expected addresses that are multiples of 16 bytes, got .* of rank 1"),
    ("inbox", inboxes(ADDRESSES[0] + 8, ADDRESSES[1]), r"inbox: expected addresses .* of rank 0"),
    ("gave_up", None, "gave_up: expected a pointer, got null"),
    ("x", view(F32, R, W), "x: expected bfloat16, got float32"),
    ("x", view(ACT, R, 44), "x: expected a stride of whole 16 bytes on axis 0"),
    ("x", view(ACT, 1, 44), "x: D: expected a multiple of 8, got 44"),
    ("x", view(ACT, R, 8200), r"x: D: expected 8\.\.8192, got 8200"),
    ("residual", view(ACT, R, W + 8), r"residual: expected \[6, 48\], got \[6, 56\]"),
    ("sum", NULL, "sum: expected rank 2, got 0"),
    ("sum", view(ACT, R, W, data=(1 << 20) + 2), "sum: expected an address that is a multiple of 16 bytes"),
    ("weight", view(F32, W + 1), r"weight: expected \[48\], got \[49\]"),
    ("weight", NULL, "out: expected a tensor with weight, null without, got the other"),
    ("out", NULL, "out: expected a tensor with weight, null without, got the other"),
    ("out", view(Dtype.FLOAT16, R, W), "out: expected bfloat16, got float16"),
    ("turn", view(I32, CAPACITY - 1), r"turn: expected \[16\], got \[15\]"),
    ("eps", float("nan"), "eps: expected a number >= 0"),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG)
def test_a_wrong_argument_is_named(library: _abi.Library, field: str, value: Any, words: str) -> None:
    with pytest.raises(ContractError, match=f"rssm_sum_ranks: {words}"):
        library.sum_ranks(replaced(good(), field, value), 0)


def test_structs_of_another_size_and_null_ones_are_refused(library: _abi.Library) -> None:
    args, record, function = good(), _abi.ErrorRecord(), library._handle.rssm_sum_ranks
    args.struct_size, args.abi_version = ctypes.sizeof(args) - 8, _abi.ABI_VERSION
    assert function(ctypes.byref(args), None, ctypes.byref(record)) == int(_abi.Status.ABI_MISMATCH)
    assert b"struct_size: expected" in record.message
    assert function(None, None, ctypes.byref(record)) == int(_abi.Status.INVALID_ARGUMENT)


def test_no_rows_are_no_launch(library: _abi.Library) -> None:
    args = good()
    for name in ("x", "residual", "sum", "out"):
        setattr(args, name, view(ACT, 0, W))
    library.sum_ranks(args, 0)
    args.weight = args.out = args.residual = NULL
    library.sum_ranks(args, 0)
