"""What every call checks alike: that there are arguments, a place for an answer, a workspace that will do; and the ring
of an update. Needs the library, not a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import view
from tests.native.test_experts_checks import experts_args
from tests.native.test_layer_checks import MULTIPROCESSORS, attention_args
from trtllm_replayssm.errors import CapacityError, ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

S, H, G, P, N = 5, 4, 2, 64, 128
ACT = Dtype.BFLOAT16
SIZE = ctypes.c_size_t(0)
# What follows the arguments in each call with a workspace, its record left out.
WORKSPACE = (ctypes.c_void_p(1 << 20), ctypes.c_size_t(1 << 20), ctypes.c_void_p(0))
COUNT = ctypes.c_int32(MULTIPROCESSORS)
CALLS: dict[str, tuple[Any, ...]] = {
    "update_workspace": (ctypes.byref(SIZE),),
    "update": WORKSPACE,
    "decay_skip_update": WORKSPACE,
    "prefill_workspace": (ctypes.byref(SIZE),),
    "prefill": WORKSPACE,
    "attention_workspace": (COUNT, ctypes.byref(SIZE)),
    "attention": (COUNT, *WORKSPACE),
    "experts_workspace": (ctypes.byref(SIZE),),
    "experts": WORKSPACE,
    "clear_state": (ctypes.c_void_p(0),),
    "reset_slots": (ctypes.c_void_p(0),),
    "prefill_commit": (ctypes.c_void_p(0),),
    "recovery_step": (ctypes.c_void_p(0),),
    "conventional_update": (ctypes.c_void_p(0),),
    "conventional_launch_text": (COUNT, ctypes.create_string_buffer(64), ctypes.c_size_t(64)),
}


def update_args(window: int, ring_rows: int) -> _abi.UpdateArgs:
    """A Mamba-2 step of no rows: it passes every check and looks for no device."""
    return _abi.UpdateArgs(
        kind=int(_abi.Kind.MAMBA2), window=window,
        slot=view(Dtype.INT32, 0), num_tokens=view(Dtype.INT32, 0), origin=view(Dtype.INT32, S), h=view(Dtype.INT32, S),
        value=view(ACT, 0, 2, H, P), k=view(ACT, 0, 2, G, N), q=view(ACT, 0, 2, G, N), out=view(ACT, 0, 2, H, P),
        dt=view(Dtype.FLOAT32, 0, 2, H), a=view(Dtype.FLOAT32, H), checkpoint=view(Dtype.FLOAT32, S, H, P, N),
        ring_value=view(ACT, S, H, ring_rows, P), ring_k=view(ACT, S, G, ring_rows, N),
        ring_dt=view(Dtype.FLOAT32, S, H, ring_rows),
    )  # fmt: skip


@pytest.mark.parametrize("operation", CALLS)
def test_missing_arguments_are_refused(library: _abi.Library, operation: str) -> None:
    record = _abi.ErrorRecord()
    status = getattr(library._handle, f"rssm_{operation}")(None, *CALLS[operation], ctypes.byref(record))
    assert status == int(_abi.Status.INVALID_ARGUMENT)
    assert record.message.decode() == f"rssm_{operation}: args: expected a pointer, got null"


@pytest.mark.parametrize(
    ("operation", "args", "more"),
    [("attention", attention_args(), (COUNT,)), ("experts", experts_args(), ()), ("update", update_args(16, 18), ())],
    ids=["attention", "experts", "update"],
)
def test_a_size_needs_a_place(library: _abi.Library, operation: str, args: Any, more: tuple[Any, ...]) -> None:
    record = _abi.ErrorRecord()
    args.struct_size, args.abi_version = ctypes.sizeof(args), _abi.ABI_VERSION
    call = getattr(library._handle, f"rssm_{operation}_workspace")
    assert call(ctypes.byref(args), *more, None, ctypes.byref(record)) == int(_abi.Status.INVALID_ARGUMENT)
    assert b"bytes: expected a pointer, got null" in record.message


def test_a_workspace_is_there_large_enough_and_aligned(library: _abi.Library) -> None:
    args = experts_args()
    size = library.experts_workspace(args)
    with pytest.raises(CapacityError, match=rf"workspace: expected {size} bytes, got {size - 1} at 0x100000"):
        library.experts(args, 1 << 20, size - 1, 0)
    with pytest.raises(CapacityError, match=rf"workspace: expected {size} bytes, got {size} at"):
        library.experts(args, 0, size, 0)
    with pytest.raises(ContractError, match="workspace: expected a 16-byte aligned address, got 0x100008"):
        library.experts(args, (1 << 20) + 8, size, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (17, r"ring_value: expected C >= window \+ T = 18 rows, got 17"),
        (257, r"ring_value: C: expected 1\.\.256, got 257"),
    ],
)
def test_a_ring_holds_a_step_and_its_rows_have_numbers_of_eight_bits(
    library: _abi.Library, rows: int, message: str
) -> None:
    assert library.update_workspace(update_args(16, 18)) == library.update_workspace(update_args(16, 256)) == 0
    with pytest.raises(ContractError, match=message):
        library.update_workspace(update_args(16, rows))
