"""The inputs of a recurrence in one launch: convolution and decay inputs, Mamba-2 and GDN, steps and prompts.

Oracles: float64 formulas of spec/ssm.py for the decay inputs (a few float32 steps allowed, outputs are float32), the
convolution alone, bit for bit, for the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.native import harness
from trtllm_replayssm.spec.ssm import sigmoid, softplus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.windows import Windows
    from trtllm_replayssm.ops import _abi

STEPS = 6 * 2.0**-24  # expf, log1pf and two products: torch's own float32 loses half of it
SUBNORMAL = 2.0**-140


class Inputs:
    """Windows with the heads' parameters, and one fused call."""

    def __init__(self, library: _abi.Library, kind: _abi.Kind, heads: int, channels: int, act: str) -> None:
        self.windows, self.kind, self.heads = Windows(library, channels, 4, act, max_tokens=16), kind, heads
        rng = self.windows.rng
        self.dt_bias, self.a_log = (
            torch.from_numpy(rng.uniform(low, high, heads).astype(np.float32)).cuda() for low, high in ((-6, 1), (0, 3))
        )
        self.limits = (0.0, float("inf"))

    def call(self, slots: list[int], counts: list[int], width: int, *, prompt: bool) -> dict[str, Any]:
        windows, rows, gdn = self.windows, len(slots), self.kind is _abi.Kind.GDN
        x = windows.tokens(rows, width).cuda()
        projection = torch.from_numpy(windows.rng.uniform(-12, 12, (rows, width, 2 * self.heads + 5)))
        projection[..., 3] = 200.0 if width > 1 else -200.0
        projection = projection.to(windows.dtype).cuda()
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            projection[row, count if slot >= 0 else 0 :] = float("nan")
            x[row, count if slot >= 0 else 0 :] = float("nan")
        decay_in, beta_in = projection[..., 3 : 3 + self.heads], projection[..., 3 + self.heads : 3 + 2 * self.heads]
        out = torch.full_like(x, float("nan"))
        decay_out, beta_out = (torch.full((rows, width, self.heads), float("nan"), device="cuda") for _ in range(2))
        indices = torch.tensor([slots, counts], dtype=torch.int32, device="cuda")
        view = harness.view
        args = _abi.SsmInputsArgs(
            kind=int(self.kind), dt_low=self.limits[0], dt_high=self.limits[1],
            conv=windows.args(indices[0], indices[1], x, out), decay_in=view(decay_in), dt_bias=view(self.dt_bias),
            decay_out=view(decay_out),
        )  # fmt: skip
        if gdn:
            args.beta_in, args.a_log, args.beta_out = view(beta_in), view(self.a_log), view(beta_out)
        operation = windows.native.ssm_inputs_prefill if prompt else windows.native.ssm_inputs_update
        operation(args, harness.Pool._stream())
        torch.cuda.synchronize()
        return {"x": x, "a": decay_in, "b": beta_in, "out": out, "decay": decay_out, "beta": beta_out}


def check(got: Any, expected: Any) -> None:
    got = got.double().cpu().numpy()
    assert np.isfinite(got).all()
    assert (np.abs(got - expected) <= STEPS * np.abs(expected) + SUBNORMAL).all(), np.abs(got / expected - 1).max()


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("kind", ["MAMBA2", "GDN"])
@pytest.mark.parametrize("heads", [1, 32, 200])
def test_decay_inputs_follow_the_formulas(library: _abi.Library, kind: str, heads: int, prompt: bool, act: str) -> None:
    inputs = Inputs(library, _abi.Kind[kind], heads, 48, act)
    width = 37 if prompt else 5
    slots, counts = [3, -1, 0, 2], [width, 4, 0, width - 2]
    result = inputs.call(slots, counts, width, prompt=prompt)
    bias, a_log = inputs.dt_bias.double().cpu().numpy(), inputs.a_log.double().cpu().numpy()
    for row, count in enumerate([width, 0, 0, width - 2]):
        raw = result["a"][row, :count].double().cpu().numpy()
        raised = softplus((raw.astype(np.float32) + bias.astype(np.float32)).astype(np.float64))
        assert (result["decay"][row, count:] == 0).all()
        if kind == "MAMBA2":
            check(result["decay"][row, :count], raised)
            assert result["beta"].isnan().all(), "Mamba-2 has no beta"
            continue
        check(result["decay"][row, :count], -np.exp(a_log) * raised)
        check(result["beta"][row, :count], sigmoid(result["b"][row, :count].double().cpu().numpy()))
        assert (result["beta"][row, count:] == 0).all()


def test_mamba2_limits_bound_the_step(library: _abi.Library) -> None:
    inputs = Inputs(library, _abi.Kind.MAMBA2, 64, 16, "bfloat16")
    inputs.limits = (0.25, 1.5)
    free = inputs.call([1], [16], 16, prompt=False)["decay"]
    assert float(free.min()) == 0.25 and float(free.max()) == 1.5
    assert int(((free > 0.25) & (free < 1.5)).sum()) > 50


def test_mamba2_limits_keep_nan(library: _abi.Library) -> None:
    """As a comparison with a bound does, in the reference too."""
    inputs = Inputs(library, _abi.Kind.MAMBA2, 64, 16, "bfloat16")
    inputs.limits = (0.25, 1.5)
    inputs.dt_bias[7] = float("nan")
    found = inputs.call([1], [16], 16, prompt=False)["decay"]
    assert found[..., 7].isnan().all()
    assert not found[..., :7].isnan().any() and not found[..., 8:].isnan().any()


@pytest.mark.parametrize("kind", ["MAMBA2", "GDN"])
@pytest.mark.parametrize("rows", [5, 600])
def test_the_convolution_has_the_bits_of_the_one_alone(library: _abi.Library, kind: str, rows: int) -> None:
    inputs = Inputs(library, _abi.Kind[kind], 96, 1536, "bfloat16")
    windows = inputs.windows
    windows.window = torch.randn(rows, windows.rows, 1536, device="cuda").to(torch.bfloat16)
    windows.position = torch.arange(rows, dtype=torch.int32, device="cuda")
    before = windows.window.clone()
    slots, counts = list(range(rows))[::-1], [row % 4 for row in range(rows)]
    result = inputs.call(slots, counts, 3, prompt=False)
    after, windows.window = windows.window, before
    alone = windows.run(slots, [min(count, 3) for count in counts], result["x"].cpu())
    assert torch.equal(alone, result["out"])
    assert torch.equal(windows.window.view(torch.int16), after.view(torch.int16))
