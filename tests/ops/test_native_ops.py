"""The native operations without a GPU: what torch sees of them, which library is taken, when the reference runs."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.layer_shapes import ssm_shape
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError, ContractError, UnsupportedError
from trtllm_replayssm.launches import TunedLaunch, UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi, native_library, torch_ops
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.native import Convolution, NativeOps
from trtllm_replayssm.ops.native_prefill import NativePrefill
from trtllm_replayssm.ops.views import aligned, view
from trtllm_replayssm.runtime.session import native_ops as choice
from trtllm_replayssm.shapes import SsmKind

CPU = torch.device("cpu")
KINDS = list(SsmKind)


class FakeLibrary:
    """Answers what `NativeOps.unsupported` asks; keeps the questions."""

    def __init__(self, answer: int | Exception) -> None:
        self.answer, self.asked = answer, []

    def update_workspace(self, args: _abi.UpdateArgs | _abi.PrefillArgs) -> int:
        self.asked.append(args)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    prefill_workspace = update_workspace


def layer(kind: SsmKind, act: torch.dtype = torch.bfloat16, **config: Any) -> tuple[ReplayLayerState, CursorTensors]:
    state = ReplayLayerState.allocate(ssm_shape(kind), ReplayConfig(**config), 3, 5, act, CPU)
    return state, CursorTensors.allocate(5, CPU)


def step(kind: SsmKind, state: ReplayLayerState, cursors: CursorTensors, ops: NativeOps, **more: bool) -> torch.Tensor:
    """Three rows of two tokens."""
    s, rows = state.shape, StepRows(torch.tensor([1, -1, 2]), torch.tensor([2, 2, 2]))
    value = torch.zeros(3, 2, s.heads, s.head_dim, dtype=torch.bfloat16)
    key, scalar = torch.zeros(3, 2, s.groups, s.state_dim, dtype=torch.bfloat16), torch.zeros(3, 2, s.heads)
    if kind is SsmKind.GDN:
        return ops.gdn_update(state, cursors, rows, key, key, value, scalar, scalar, **more)
    vector = torch.zeros(s.heads)
    return ops.mamba2_update(state, cursors, rows, value, key, key, scalar, vector, d_skip=vector, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_get_the_shape_and_type_of_the_values(kind: SsmKind) -> None:
    with FakeTensorMode():
        state, cursors = layer(kind, max_step_tokens=2)
        out = step(kind, state, cursors, NativeOps(FakeLibrary(0), CPU))  # type: ignore[arg-type]
        assert out.shape == (3, 2, state.shape.heads, state.shape.head_dim) and out.dtype is torch.bfloat16


@pytest.mark.parametrize("prompt", [True, False])
def test_convolution_and_norm_give_the_shape_and_type_of_their_input(prompt: bool) -> None:
    with FakeTensorMode():
        ops, (_, cursors) = NativeOps(FakeLibrary(0), CPU), layer(SsmKind.GDN)  # type: ignore[arg-type]
        x = torch.zeros(2, 3, 40, dtype=torch.float16)[..., 8:24]
        window, weight = torch.zeros(5, 6, 16, dtype=torch.float16), torch.zeros(16, 4)
        row = torch.zeros(2, dtype=torch.int32)
        operation = torch.ops.replayssm.conv1d_prefill if prompt else torch.ops.replayssm.conv1d_update
        out = operation(
            flags=0, slot=row, num_tokens=row, position=cursors.position, x=x, weight=weight, bias=None, window=window
        )
        normed = ops.gated_rms_norm(out, x, torch.zeros(16), 1e-5, groups=2, gate_first=True)
        for got in (out, normed):
            assert got.shape == (2, 3, 16) and got.dtype is torch.float16 and got.is_contiguous()


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_decay_inputs_are_float32_of_every_head(kind: SsmKind, prompt: bool) -> None:
    with FakeTensorMode():
        ops, (state, cursors) = NativeOps(FakeLibrary(0), CPU), layer(kind)  # type: ignore[arg-type]
        rows = StepRows(torch.tensor([1, -1]), torch.tensor([2, 2]))
        x, heads = torch.zeros(2, 3, 16, dtype=torch.float16), torch.zeros(2, 3, state.shape.heads, dtype=torch.float16)
        conv = Convolution(0, torch.zeros(5, 6, 16), x, torch.zeros(16, 4), None, torch.zeros_like(x), prompt)
        vector, gdn = torch.zeros(state.shape.heads), kind is SsmKind.GDN
        decay, beta = ops.ssm_inputs(
            state.shape, conv, cursors, rows, heads, heads if gdn else None, vector, a_log=vector if gdn else None
        )
        for got in (decay, beta):
            assert got.shape == heads.shape and got.dtype is torch.float32
        assert (beta is decay) == (kind is SsmKind.MAMBA2)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_gets_the_inputs_of_a_recurrence_by_their_names(
    kind: SsmKind, prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the operation behind the device check, on CPU tensors."""
    calls: list[tuple[str, Any, int]] = []
    native = SimpleNamespace(
        **{n: partial(lambda n, args, stream: calls.append((n, args, stream)), n)
           for n in ("ssm_inputs_update", "ssm_inputs_prefill")}
    )  # fmt: skip
    monkeypatch.setattr(torch_ops, "installed_library", lambda: native)
    monkeypatch.setattr(torch_ops, "current_stream", lambda tensor: 11)
    for name in ("ssm_inputs_update", "ssm_inputs_prefill"):
        signature = torch_ops.SSM_INPUTS_PREFILL if name.endswith("prefill") else torch_ops.SSM_INPUTS_UPDATE
        launch = torch_ops.launcher(signature, torch_ops.ssm_inputs_call(name))
        by_name = partial(lambda launch, names, **given: launch(*[given[n] for n in names]), launch, signature.names)
        monkeypatch.setattr(torch.ops.replayssm, name, by_name)
    ops, (state, cursors) = NativeOps(FakeLibrary(0), CPU), layer(kind)  # type: ignore[arg-type]
    rows = StepRows(torch.tensor([1, -1]), torch.tensor([2, 2]))
    x, heads = torch.zeros(2, 3, 16).half(), torch.zeros(2, 3, state.shape.heads).half()
    conv = Convolution(0, torch.zeros(5, 6, 16).half(), x, torch.zeros(16, 4), None, torch.zeros_like(x), prompt)
    vector, gdn = torch.zeros(state.shape.heads), kind is SsmKind.GDN
    decay, _ = ops.ssm_inputs(
        state.shape, conv, cursors, rows, heads, heads if gdn else None, vector, a_log=vector if gdn else None
    )
    ((name, args, stream),) = calls
    assert (name, stream) == (f"ssm_inputs_{'prefill' if prompt else 'update'}", 11)
    assert (args.kind, args.dt_low, args.dt_high) == (int(_abi.Kind[kind.name]), 0.0, float("inf"))
    assert (args.conv.x.data, args.conv.out.data) == (x.data_ptr(), conv.out.data_ptr())
    assert args.decay_out.data == decay.data_ptr() and args.conv.bias.rank == 0
    assert (args.beta_in.rank, args.a_log.rank, args.beta_out.rank) == ((3, 1, 3) if gdn else (0, 0, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_asks_for_the_launch_of_its_rows_and_tokens(kind: SsmKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the operation behind the device check, on CPU tensors: three rows of two tokens."""
    calls: list[_abi.UpdateArgs] = []
    native = SimpleNamespace(update=lambda args, workspace, size, stream: calls.append(args))
    monkeypatch.setattr(torch_ops, "installed_library", lambda: native)
    monkeypatch.setattr(torch_ops, "current_stream", lambda tensor: 11)
    launch = torch_ops.launcher(torch_ops.UPDATE, torch_ops.update_call)
    monkeypatch.setattr(
        torch.ops.replayssm, "update", lambda **given: launch(*[given[name] for name in torch_ops.UPDATE.names])
    )
    runs = UpdateLaunch(kernel=UpdateKernel.STREAMED, run_heads=2)
    for rows, tokens in ((3, 2), (2, 2), (2, 3), (3, 1)):
        tuned = (TunedLaunch(rows=rows, tokens=tokens, launch=runs),)
        state, cursors = layer(kind, max_step_tokens=2, launches=tuned)
        step(kind, state, cursors, NativeOps(FakeLibrary(0), CPU))  # type: ignore[arg-type]
    asked = [[getattr(args.launch, name) for name, _ in args.launch._fields_] for args in calls]
    assert asked == [runs.numbers, [0] * 6, [0] * 6, [0] * 6] and calls[0].launch.run_heads == 2
    step(kind, state, cursors, NativeOps(FakeLibrary(0), CPU), settled=True)  # type: ignore[arg-type]
    assert [args.flags for args in calls] == [_abi.UPDATE_PROGRAMMATIC_LAUNCH] * 4 + [
        _abi.UPDATE_PROGRAMMATIC_LAUNCH | _abi.UPDATE_SETTLED_STATE
    ], "only who promises settled states gets them"


def test_a_launch_that_the_library_refuses_is_named_when_the_session_is_made() -> None:
    refusal = ContractError("rssm_update_launch_plan", "launch", expected="kernel 2 (direct)", got="kernel 1")
    asked: list[tuple[_abi.UpdateArgs, int]] = []

    def plan(args: _abi.UpdateArgs, multiprocessors: int) -> None:
        asked.append((args, multiprocessors))
        if args.launch.kernel == UpdateKernel.PLAIN:
            raise refusal

    library = SimpleNamespace(update_launch_plan=plan)
    tuned = [TunedLaunch(rows=7, tokens=2, launch=UpdateLaunch(kernel=k)) for k in UpdateKernel]
    state, cursors = layer(SsmKind.GDN, max_step_tokens=2, launches=tuple(tuned[1:]))
    ops = NativeOps(library, CPU)  # type: ignore[arg-type]
    ops.require_launches(state, cursors, torch.bfloat16, 132)
    assert [(list(args.value.shape)[:2], m) for args, m in asked] == [([7, 2], 132)] * 3
    state, cursors = layer(SsmKind.GDN, max_step_tokens=2, launches=tuple(tuned[:1]))
    with pytest.raises(ConfigError, match=r"7 rows of 2 tokens: expected kernel 2 \(direct\), got plain.*tune again"):
        ops.require_launches(state, cursors, torch.bfloat16, 132)


def test_launches_of_any_number_of_rows_are_asked_for_without_their_memory() -> None:
    library = SimpleNamespace(update_launch_plan=lambda args, multiprocessors: asked.append(list(args.value.shape)))
    asked: list[list[int]] = []
    tuned = TunedLaunch(rows=(1 << 31) - 1, tokens=2, launch=UpdateLaunch(kernel=UpdateKernel.DIRECT))
    state, cursors = layer(SsmKind.GDN, max_step_tokens=2, launches=(tuned,))
    NativeOps(library, CPU).require_launches(state, cursors, torch.bfloat16, 132)  # type: ignore[arg-type]
    assert [shape[:2] for shape in asked] == [[(1 << 31) - 1, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_export_keeps_the_operation_and_the_state_it_changes(kind: SsmKind) -> None:
    state, cursors = layer(kind, max_step_tokens=2)
    ops = NativeOps(FakeLibrary(0), CPU)  # type: ignore[arg-type]

    class Step(torch.nn.Module):
        def forward(self, checkpoint: torch.Tensor) -> torch.Tensor:
            state.checkpoint.data = checkpoint
            return step(kind, state, cursors, ops) * 2

    graph = torch.export.export(Step(), (state.checkpoint.data,), strict=False).graph
    (call,) = (node for node in graph.nodes if "replayssm" in str(node.target))
    assert call.target is torch.ops.replayssm.update.default
    arguments = call.target._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {n.rstrip("?") for n in torch_ops.UPDATE.state} and "checkpoint" in written


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_on_the_cpu_are_refused(kind: SsmKind) -> None:
    state, cursors = layer(kind, max_step_tokens=2)
    with pytest.raises(ContractError, match="expected CUDA tensors, got cpu"):
        step(kind, state, cursors, NativeOps(FakeLibrary(0), CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [None, StateFormat.NVFP4, StateFormat.FP8])
def test_the_library_is_asked_about_the_pool_as_it_is(kind: SsmKind, read: StateFormat | None) -> None:
    state, cursors = layer(kind, max_step_tokens=4, recurrence=StateFormat.FLOAT16, read=read)
    asked = FakeLibrary(48)
    ops = NativeOps(asked, CPU)  # type: ignore[arg-type]
    assert ops.unsupported(state, cursors, torch.bfloat16) is None
    assert [args.value.shape[1] for args in asked.asked] == [1, 4] and ops._workspace.numel() == 48
    args, s = asked.asked[1], state.shape
    assert (args.kind, args.window, args.layer) == (int(_abi.Kind[kind.name]), 16, 3)
    assert list(args.checkpoint.shape) == [5, s.heads, s.head_dim, s.state_dim]
    assert args.checkpoint.dtype == _abi.Dtype.FLOAT16 and args.checkpoint.data == state.checkpoint.data.data_ptr()
    assert list(args.ring_value.shape) == [5, s.heads, 20, s.head_dim]
    assert (args.dt.rank == 0) == (kind is SsmKind.GDN) == (args.beta.rank == 3)
    if read is None:
        assert args.read.rank == 0
    else:
        dtype = _abi.Dtype.FLOAT4_E2M1 if read is StateFormat.NVFP4 else _abi.Dtype.FLOAT8_E4M3
        assert args.read.dtype == dtype and list(args.read.shape) == list(args.checkpoint.shape)
        assert list(args.read.stride) == list(args.checkpoint.stride)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_ask_for_their_workspace_and_become_one_operation(kind: SsmKind) -> None:
    state, cursors = layer(kind, max_step_tokens=4)
    asked, s = FakeLibrary(24), state.shape
    prefill = NativePrefill(asked)  # type: ignore[arg-type]
    assert prefill.unsupported(state, cursors) is None
    tokens = {
        "value": torch.zeros(2, 9, s.heads, s.head_dim, dtype=torch.bfloat16),
        "k": torch.zeros(2, 9, s.groups, s.state_dim, dtype=torch.bfloat16),
        "q": torch.zeros(2, 9, s.groups, s.state_dim, dtype=torch.bfloat16),
    }
    gates = ("log_decay", "beta") if kind is SsmKind.GDN else ("dt",)
    tokens |= {name: torch.zeros(2, 9, s.heads) for name in gates}
    tokens |= {} if kind is SsmKind.GDN else {name: torch.zeros(s.heads) for name in ("a", "skip")}
    rows = StepRows(torch.tensor([1, -1]), torch.tensor([9, 0]))
    carry, flags = torch.zeros(1, s.heads, s.head_dim, s.state_dim), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ContractError, match="replayssm::prefill: device: expected CUDA tensors"):
        prefill.scan(state, cursors, rows, tokens, flags, carry, flags)
    args = asked.asked[-1]
    assert list(args.value.shape) == [2, 9, s.heads, s.head_dim] and list(args.carry.shape) == list(carry.shape)
    assert args.ring_k.data == state.ring_key.data_ptr() and args.carry_index.rank == 1


def test_what_the_library_refuses_is_said_in_its_words() -> None:
    refusal = UnsupportedError("rssm_update", "value, k", expected="success", got="no kernel for d_v 16")
    state, cursors = layer(SsmKind.MAMBA2)
    reason = NativeOps(FakeLibrary(refusal), CPU).unsupported(state, cursors, state.ring_key.dtype)  # type: ignore[arg-type]
    assert reason is not None and "no kernel for d_v 16" in reason
    state, cursors = layer(SsmKind.MAMBA2, torch.float32)
    asked = FakeLibrary(0)
    reason = NativeOps(asked, CPU).unsupported(state, cursors, state.ring_key.dtype)  # type: ignore[arg-type]
    assert reason is not None and "float32" in reason and not asked.asked


def pools_on(device: str, *, conventional: bool = False) -> Any:
    cursors = SimpleNamespace(position=SimpleNamespace(device=torch.device(device)))
    return SimpleNamespace(cursors=cursors, conventional=conventional, ssm={})


@pytest.mark.parametrize(("device", "conventional", "said"), [("cpu", False, 0), ("cuda", False, 1), ("cuda", True, 1)])
def test_without_a_library_cuda_says_once_that_it_runs_the_reference(
    device: str, conventional: bool, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "find_library", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert choice.native_ops(pools_on(device, conventional=conventional)) is None
    assert len(caplog.messages) == said and all("reference" in m and "\n" not in m for m in caplog.messages)


def test_a_device_below_the_kernels_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "find_library", lambda: Path("libreplayssm.so"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with caplog.at_level(logging.WARNING):
        assert choice.native_ops(pools_on("cuda")) is None
    (line,) = caplog.messages
    assert "compute capability 9.0" in line and "reference" in line


def test_the_library_is_looked_for_in_the_environment_then_the_package_then_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(native_library.VARIABLE, raising=False)
    package, checkout = native_library.candidates()
    assert package.parts[-3:] == ("trtllm_replayssm", "native", native_library.FILE_NAME)
    assert checkout.parts[-3:] == ("build", "native", native_library.FILE_NAME)
    monkeypatch.setattr(native_library, "candidates", lambda: [tmp_path / "none.so"])
    assert native_library.find_library() is None
    with pytest.raises(ConfigError, match=r"none of them.*docs/kernels\.md"):
        native_library.installed_library()
    monkeypatch.undo()
    monkeypatch.setenv(native_library.VARIABLE, str(tmp_path / "gone.so"))
    with pytest.raises(ConfigError, match=r"gone\.so"):
        native_library.find_library()
    (tmp_path / "gone.so").write_text("no library")
    path = native_library.find_library()
    assert path is not None
    with pytest.raises(ConfigError, match="a loadable library"):
        native_library.load_library(path)


def test_inputs_with_odd_addresses_are_copied_and_others_are_not() -> None:
    base = torch.arange(64, dtype=torch.float32).to(torch.bfloat16)
    even, odd = base[8:24].view(2, 8), base[1:17].view(2, 8)
    assert aligned(even) is even
    assert aligned(odd) is not odd and torch.equal(aligned(odd), odd)
    transposed = base.view(8, 8).t()
    assert aligned(transposed).is_contiguous()


def test_packed_codes_are_counted_one_by_one() -> None:
    packed = torch.zeros(2, 3, 8, dtype=torch.uint8)
    seen = view(packed)
    assert seen.dtype == _abi.Dtype.FLOAT4_E2M1 and list(seen.shape)[:3] == [2, 3, 16]
    assert list(seen.stride)[:3] == [48, 16, 1]
    with pytest.raises(ContractError, match="dtype"):
        view(torch.zeros(2, dtype=torch.bool))
