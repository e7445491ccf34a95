"""Wrong calls of the operations around the recurrence are named before any launch. Needs the library, not a GPU.

Each operation has one good call; every case spoils one argument of it. Addresses are made up: nothing is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.native import harness
from tests.native.made_up import NULL, replaced, view
from trtllm_replayssm.errors import ContractError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

B, T, D, K, S, H, G, P, N, C = 3, 2, 24, 4, 5, 4, 2, 16, 32, 18
ACT = Dtype.BFLOAT16


def conv_args() -> _abi.Conv1dArgs:
    return _abi.Conv1dArgs(
        slot=view(Dtype.INT32, B),
        num_tokens=view(Dtype.INT32, B),
        position=view(Dtype.INT32, S),
        x=view(ACT, B, T, D, stride=(T * 100, 100, 1)),
        weight=view(Dtype.FLOAT32, D, K),
        bias=view(Dtype.FLOAT32, D),
        window=view(ACT, S, K - 1 + T, D),
        out=view(ACT, B, T, D),
    )


def input_args() -> _abi.SsmInputsArgs:
    return _abi.SsmInputsArgs(
        kind=int(_abi.Kind.GDN),
        conv=conv_args(),
        decay_in=view(ACT, B, T, H),
        beta_in=view(ACT, B, T, H),
        dt_bias=view(Dtype.FLOAT32, H),
        a_log=view(Dtype.FLOAT32, H),
        decay_out=view(Dtype.FLOAT32, B, T, H),
        beta_out=view(Dtype.FLOAT32, B, T, H),
    )


def norm_args() -> _abi.GatedRmsNormArgs:
    return _abi.GatedRmsNormArgs(
        groups=3,
        gate_first=1,
        eps=1e-5,
        x=view(ACT, B, T, D),
        gate=view(ACT, B, T, D, stride=(T * 100, 100, 1)),
        weight=view(Dtype.FLOAT32, D),
        out=view(ACT, B, T, D),
    )


def reset_args() -> _abi.ResetSlotsArgs:
    cursors = {name: view(Dtype.INT32, S) for name in ("origin", "h", "position")}
    return _abi.ResetSlotsArgs(
        slot=view(Dtype.INT32, B), new_seed=view(Dtype.INT64, B), seed=view(Dtype.INT64, S), **cursors
    )


def copies() -> dict[str, _abi.Tensor]:
    return {
        "checkpoint": view(Dtype.FLOAT8_E4M3, S, H, P, N),
        "checkpoint_scale": view(Dtype.FLOAT32, S, H, P, 1),
        "read": view(Dtype.FLOAT4_E2M1, S, H, P, N),
        "read_scale": view(Dtype.FLOAT8_E4M3, S, H, P, N // 16),
        "read_head_scale": view(Dtype.FLOAT32, S, H),
    }


def clear_args() -> _abi.ClearStateArgs:
    return _abi.ClearStateArgs(slot=view(Dtype.INT32, B), **copies())


def export_args() -> _abi.StateExportArgs:
    return _abi.StateExportArgs(
        kind=int(_abi.Kind.GDN),
        window=16,
        slot=view(Dtype.INT32, B),
        origin=view(Dtype.INT32, S),
        h=view(Dtype.INT32, S),
        checkpoint=view(Dtype.FLOAT32, S, H, P, N),
        ring_value=view(Dtype.FLOAT16, S, H, C, P),
        ring_k=view(ACT, S, G, C, N),
        ring_dt=view(Dtype.FLOAT32, S, H, C),
        ring_key_factor=view(Dtype.FLOAT32, S, G, C),
        state=view(Dtype.FLOAT32, B, H, P, N),
    )


def import_args() -> _abi.StateImportArgs:
    return _abi.StateImportArgs(
        slot=view(Dtype.INT32, B),
        position=view(Dtype.INT32, B),
        seed=view(Dtype.INT64, B),
        state=view(Dtype.FLOAT32, B, H, P, N),
        **copies(),
    )


GOOD: dict[str, Callable[[], Any]] = {
    "conv1d_update": conv_args,
    "conv1d_prefill": conv_args,
    "ssm_inputs_update": input_args,
    "ssm_inputs_prefill": input_args,
    "gated_rms_norm": norm_args,
    "reset_slots": reset_args,
    "clear_state": clear_args,
    "state_export": export_args,
    "state_import": import_args,
}
INT32_PAIR = view(Dtype.INT32, B, 1)

# operation, what is replaced ("conv.x" is a field of a field), by what, words of the message
WRONG: list[tuple[str, str, Any, str]] = [
    ("conv1d_update", "x", view(Dtype.FLOAT32, B, T, D), "x: expected bfloat16, got float32"),
    ("conv1d_update", "x", view(ACT, B, T, D, stride=(T * D, 1, T)), "x: expected stride 1 on axis 2, got 2"),
    ("conv1d_update", "slot", view(Dtype.INT32, B + 1), r"slot: expected \[3\], got \[4\]"),
    ("conv1d_update", "slot", INT32_PAIR, "slot: expected rank 1, got 2"),
    ("conv1d_update", "num_tokens", view(Dtype.INT64, B), "num_tokens: expected int32, got int64"),
    ("conv1d_update", "position", NULL, "position: expected rank 1, got 0"),
    ("conv1d_update", "position", view(Dtype.INT32, 0), r"position: S: expected 1\.\.2147483647, got 0"),
    ("conv1d_update", "weight", view(Dtype.FLOAT32, D, 9), r"weight: K: expected 2\.\.8, got 9"),
    ("conv1d_update", "weight", view(Dtype.FLOAT32, D, 1), r"weight: K: expected 2\.\.8, got 1"),
    ("conv1d_update", "weight", view(Dtype.FLOAT32, D, K, stride=(1, D)), "weight: expected stride 1 on axis 1"),
    ("conv1d_update", "bias", view(Dtype.FLOAT32, D - 1), r"bias: expected \[24\], got \[23\]"),
    ("conv1d_update", "window", view(ACT, S, K - 2 + T, D), r"window: R: expected at least K - 1 \+ T = 5 rows, got 4"),
    ("conv1d_update", "window", view(Dtype.FLOAT16, S, 9, D), "window: expected bfloat16, got float16"),
    ("conv1d_update", "window", view(ACT, S - 1, 9, D), r"window: expected \[5, any, 24\], got \[4, 9, 24\]"),
    ("conv1d_update", "out", view(ACT, B, T, D, data=0), "out: expected a pointer, got null"),
    ("conv1d_prefill", "window", view(ACT, S, K - 2, D), "window: R: expected at least K - 1 = 3 rows, got 2"),
    ("ssm_inputs_update", "kind", 3, r"kind: expected 1\.\.2, got 3"),
    ("ssm_inputs_update", "conv.x", view(Dtype.FLOAT32, B, T, D), "x: expected bfloat16"),
    ("ssm_inputs_update", "decay_in", view(ACT, B, T + 1, H), r"decay_in: expected \[3, 2, any\]"),
    ("ssm_inputs_update", "decay_in", view(Dtype.FLOAT32, B, T, H), "decay_in: expected bfloat16, got float32"),
    ("ssm_inputs_update", "beta_in", view(ACT, B, T, H + 1), r"beta_in: expected \[3, 2, 4\]"),
    ("ssm_inputs_update", "a_log", NULL, "a_log: expected rank 1, got 0"),
    ("ssm_inputs_update", "decay_out", view(Dtype.FLOAT32, B, T, H, stride=(80, 8, 1)), "decay_out: expected stride 4"),
    ("ssm_inputs_prefill", "beta_out", view(ACT, B, T, H), "beta_out: expected float32, got bfloat16"),
    ("gated_rms_norm", "groups", 5, "groups: expected a divisor of D = 24, got 5"),
    ("gated_rms_norm", "groups", 0, r"groups: expected 1\.\.24, got 0"),
    ("gated_rms_norm", "gate_first", 2, r"gate_first: expected 0\.\.1, got 2"),
    ("gated_rms_norm", "gate_first", 0, r"weight: expected \[8\], got \[24\]"),
    ("gated_rms_norm", "eps", -1.0, "eps: expected a number >= 0, got -1"),
    ("gated_rms_norm", "eps", float("nan"), "eps: expected a number >= 0, got"),
    ("gated_rms_norm", "x", view(ACT, B, -1, D), r"x: expected \[any, any, any\], got \[3, -1, 24\]"),
    ("gated_rms_norm", "gate", view(Dtype.FLOAT16, B, T, D), "gate: expected bfloat16, got float16"),
    ("gated_rms_norm", "weight", view(Dtype.FLOAT32, D, data=(1 << 20) + 2), "weight: expected .* multiple of 4 bytes"),
    ("reset_slots", "new_seed", view(Dtype.INT32, B), "new_seed: expected int64, got int32"),
    ("reset_slots", "seed", view(Dtype.INT64, S, data=(1 << 20) + 4), "seed: expected .* multiple of 8 bytes"),
    ("reset_slots", "origin", view(Dtype.INT32, -1), r"origin: expected \[any\], got \[-1\]"),
    ("reset_slots", "seed", view(Dtype.INT64, S - 1), r"seed: expected \[5\], got \[4\]"),
    ("reset_slots", "h", view(Dtype.INT32, S, stride=(2,)), "h: expected stride 1 on axis 0, got 2"),
    ("reset_slots", "slot", view(Dtype.INT32, 70000), r"slot: R: expected 0\.\.65535, got 70000"),
    ("clear_state", "checkpoint", view(Dtype.FLOAT4_E2M1, S, H, P, N), "checkpoint: expected float32, float16 or"),
    ("clear_state", "checkpoint", view(Dtype.FLOAT8_E4M3, S, -1, P, N), r"checkpoint: expected .* got \[5, -1, 16"),
    ("clear_state", "checkpoint_scale", NULL, "checkpoint_scale: expected rank 4, got 0"),
    ("clear_state", "read", view(Dtype.FLOAT32, S, H, P, N), "read: expected float16, float8_e4m3 or float4_e2m1"),
    ("clear_state", "read_scale", view(Dtype.FLOAT8_E4M3, S, H, P, 1), r"read_scale: expected \[5, 4, 16, 2\]"),
    ("state_export", "ring_k", view(ACT, S, 3, C, N), "ring_k: G: expected groups that divide the 4 heads, got 3"),
    ("state_export", "ring_k", view(ACT, S, G, 16, N), r"ring_k: C: expected 17\.\.2147483647, got 16"),
    ("state_export", "ring_value", view(ACT, S, H, C, P), "ring_value: expected float16, got bfloat16"),
    ("state_export", "ring_key_factor", NULL, "ring_key_factor: expected rank 3, got 0"),
    ("state_export", "ring_v", view(ACT, S, H, C, P), "ring_beta: expected rank 3, got 0"),
    ("state_export", "state", view(Dtype.FLOAT32, B, H, P, N, data=4), "state: expected an address and a slot stride"),
    ("state_export", "window", 65, r"window: expected 1\.\.64, got 65"),
    ("state_import", "seed", NULL, "seed: expected rank 1, got 0"),
    ("state_import", "state", view(Dtype.FLOAT32, B + 1, H, P, N), r"state: expected \[3, 4, 16, 32\]"),
    ("state_import", "layer", 65536, r"layer: expected 0\.\.65535, got 65536"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "field", "value", "words"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_a_wrong_argument_is_named(library: _abi.Library, operation: str, field: str, value: Any, words: str) -> None:
    with pytest.raises(ContractError, match=f"rssm_{operation}: {words}"):
        getattr(library, operation)(replaced(GOOD[operation](), field, value), 0)


@pytest.mark.parametrize("operation", ["conv1d_update", "ssm_inputs_update"])
def test_a_step_has_at_most_sixteen_tokens_and_a_prompt_any(library: _abi.Library, operation: str) -> None:
    args = GOOD[operation]()
    conv = args.conv if operation == "ssm_inputs_update" else args
    conv.x, conv.out, conv.window = view(ACT, B, 17, D), view(ACT, B, 17, D), view(ACT, S, 64, D)
    with pytest.raises(ContractError, match=r"x: T: expected 0\.\.16, got 17"):
        getattr(library, operation)(args, 0)


def test_mamba2_needs_no_gates_of_gdn_but_ordered_limits(library: _abi.Library) -> None:
    args = input_args()
    args.kind, args.dt_low, args.dt_high = int(_abi.Kind.MAMBA2), 2.0, 1.0
    args.beta_in = args.a_log = args.beta_out = NULL
    with pytest.raises(ContractError, match="dt_low, dt_high: expected dt_low <= dt_high, got 2 and 1"):
        library.ssm_inputs_update(args, 0)


@pytest.mark.parametrize("operation", sorted(GOOD))
def test_structs_of_another_size_are_refused(library: _abi.Library, operation: str) -> None:
    args, record = GOOD[operation](), _abi.ErrorRecord()
    args.struct_size, args.abi_version = ctypes.sizeof(args) - 8, _abi.ABI_VERSION
    status = getattr(library._handle, f"rssm_{operation}")(ctypes.byref(args), None, ctypes.byref(record))
    assert status == int(_abi.Status.ABI_MISMATCH) and b"struct_size: expected" in record.message


def test_a_nested_struct_of_another_version_is_refused(library: _abi.Library) -> None:
    args, record = input_args(), _abi.ErrorRecord()
    args.struct_size, args.abi_version = ctypes.sizeof(args), _abi.ABI_VERSION
    args.conv.struct_size, args.conv.abi_version = ctypes.sizeof(args.conv), _abi.ABI_VERSION + 1
    status = library._handle.rssm_ssm_inputs_update(ctypes.byref(args), None, ctypes.byref(record))
    assert status == int(_abi.Status.ABI_MISMATCH) and b"abi_version" in record.message


@pytest.mark.parametrize("operation", sorted(GOOD))
def test_a_null_struct_is_refused(library: _abi.Library, operation: str) -> None:
    record = _abi.ErrorRecord()
    assert getattr(library._handle, f"rssm_{operation}")(None, None, ctypes.byref(record)) == 1
    assert b"args: expected a pointer, got null" in record.message


def test_states_that_no_kernel_takes_are_unsupported(library: _abi.Library) -> None:
    args = clear_args()
    args.checkpoint, args.checkpoint_scale = view(Dtype.FLOAT32, S, H, P, 24), NULL
    args.read = view(Dtype.FLOAT4_E2M1, S, H, P, 24)
    with pytest.raises(UnsupportedError, match="read: N: expected a multiple of 16 for float4_e2m1, got 24"):
        library.clear_state(args, 0)
    odd = import_args()
    odd.checkpoint, odd.state, odd.read = view(Dtype.FLOAT32, S, H, P, 30), view(Dtype.FLOAT32, B, H, P, 30), NULL
    with pytest.raises(UnsupportedError, match="checkpoint: N: expected a multiple of 4, got 30"):
        library.state_import(odd, 0)


def test_empty_calls_do_nothing(library: _abi.Library) -> None:
    conv = conv_args()
    conv.slot = conv.num_tokens = view(Dtype.INT32, 0)
    conv.x = conv.out = view(ACT, 0, T, D)
    library.conv1d_update(conv, 0)
    conv.x = conv.out = view(ACT, 0, 0, D)
    library.conv1d_prefill(conv, 0)
    norm = norm_args()
    norm.x = norm.gate = norm.out = view(ACT, B, 0, D)
    library.gated_rms_norm(norm, 0)
    reset = reset_args()
    reset.slot, reset.new_seed = view(Dtype.INT32, 0), view(Dtype.INT64, 0)
    library.reset_slots(reset, 0)
    clear = clear_args()
    clear.slot = view(Dtype.INT32, 0)
    library.clear_state(clear, 0)
