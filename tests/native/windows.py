"""Convolution windows of all slots on the device and the float64 specification beside them, driven by the same calls.

Oracle: spec/conv1d.py. An output may differ by one rounding of the activation type plus the float32 arithmetic, which
is relative to the sum of the magnitudes; the window must hold the inputs' bits, and nothing else may change.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from tests.native import harness
from trtllm_replayssm.bench.rounding import TYPES, output_bound
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.spec.conv1d import conv_step

# What float32 loses of sums of up to nine terms and of SiLU by the fast exponential, in units of the terms' magnitudes.
ARITHMETIC = 2.0**-21
CANARY = 77.0


def rounding_bound(expected: Any, act: str, magnitude: Any) -> Any:
    """How far an output may be from the float64 value."""
    exact, sizes = (torch.from_numpy(np.array(array, np.float64)) for array in (expected, magnitude))
    return output_bound(exact, sizes, TYPES[getattr(torch, act)], ARITHMETIC).numpy()


class Windows:
    """Windows [S, K - 1 + T_max, D], poisoned; x and out are slices of wider tensors."""

    def __init__(
        self, library: _abi.Library, channels: int, kernel: int = 4, act: str = "bfloat16", *, slots: int = 5,
        max_tokens: int = 16, offset: int = 8,
    ) -> None:  # fmt: skip
        """offset: channels before the slice; an odd one forbids wide accesses."""
        self.native, self.act, self.offset = library, act, offset
        self.rng = np.random.default_rng(channels * 10 + kernel)
        self.dtype = getattr(torch, act)
        self.channels, self.kernel = channels, kernel
        self.weight = torch.from_numpy(self.rng.standard_normal((channels, kernel)).astype(np.float32)).cuda()
        self.bias = torch.from_numpy(self.rng.standard_normal(channels).astype(np.float32)).cuda()
        self.rows = kernel - 1 + max_tokens
        self.window = torch.full((slots, self.rows, channels), float("nan"), dtype=self.dtype, device="cuda")
        self.position = torch.zeros(slots, dtype=torch.int32, device="cuda")
        self.at = [0] * slots  # the positions on the host: reading them from the device would wait for it each time
        # the specification writes a token before it reads the taps, so it needs a row more than the kernel at least
        self.spec = {slot: np.zeros((kernel + max_tokens, channels)) for slot in range(slots)}

    def tokens(self, rows: int, count: int) -> Any:
        """Random inputs [rows, count, D] on the host, rounded."""
        return torch.from_numpy(self.rng.standard_normal((rows, count, self.channels))).to(self.dtype)

    def wide(self, fill: float, rows: int, count: int) -> tuple[Any, Any]:
        """A tensor and its slice [rows, count, D]."""
        whole = torch.full((rows, count, self.channels + 24), fill, dtype=self.dtype, device="cuda")
        return whole, whole[..., self.offset : self.offset + self.channels]

    def args(self, slot: Any, num_tokens: Any, x: Any, out: Any, *, flags: int = 0) -> _abi.Conv1dArgs:
        view = harness.view
        return _abi.Conv1dArgs(
            flags=flags, slot=view(slot), num_tokens=view(num_tokens), position=view(self.position), x=view(x),
            weight=view(self.weight), bias=view(self.bias), window=view(self.window), out=view(out),
        )  # fmt: skip

    def run(self, slots: list[int], counts: list[int], x: Any, *, prompt: bool = False, flags: int = 0) -> Any:
        """One call on x [B, T, D] (host); positions stay. Returns the outputs [B, T, D] on the device."""
        rows, width = len(slots), x.shape[1]
        live = (
            torch.arange(width)
            < torch.tensor([n if s >= 0 else 0 for s, n in zip(slots, counts, strict=True)])[:, None]
        )
        poisoned = x.masked_fill(~live[..., None], float("nan"))
        _, given = self.wide(float("nan"), rows, width)
        given.copy_(poisoned)
        whole, out = self.wide(CANARY, rows, width)
        out.fill_(float("nan"))
        indices = torch.full((rows, 3), 123456, dtype=torch.int32)
        indices[:, 0], indices[:, 1] = torch.tensor(slots), torch.tensor(counts)
        device = indices.cuda()
        call = self.native.conv1d_prefill if prompt else self.native.conv1d_update
        call(self.args(device[:, 0], device[:, 1], given, out, flags=flags), harness.Pool._stream())
        torch.cuda.synchronize()
        assert (whole[..., : self.offset] == CANARY).all(), "nothing before the slice is written"
        assert (whole[..., self.offset + self.channels :] == CANARY).all(), "nothing behind the slice is written"
        return out

    def step(
        self, slots: list[int], counts: list[int], accepted: list[int], width: int, *, prompt: bool = False
    ) -> None:
        """One call and the move of the positions on both sides, compared."""
        x, expected_window = self.tokens(len(slots), width), self.window.cpu()
        out = self.run(slots, counts, x, prompt=prompt).cpu()
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            live = count if slot >= 0 else 0
            assert (out[row, live:] == 0).all(), "tokens that do not exist are zero"
            if live:
                self.check_row(slot, x[row, :live], out[row, :live].double().numpy())
                self.expect_window(expected_window, slot, x[row, :live])
                self.at[slot] += accepted[row]
        self.position.copy_(torch.tensor(self.at, dtype=torch.int32))
        bits = torch.int16
        assert torch.equal(self.window.cpu().view(bits), expected_window.view(bits))

    def check_row(self, slot: int, x: Any, got: Any) -> None:
        values, position = x.double().numpy(), self.at[slot]
        weight, bias = self.filter_host
        magnitude = conv_magnitude(self.spec[slot].copy(), position, values, weight, bias)
        expected = conv_step(self.spec[slot], position, values, weight, bias)
        bound = rounding_bound(expected, self.act, magnitude)
        assert np.isfinite(got).all(), "no poison in an output"
        worst = np.unravel_index(np.argmax(np.abs(got - expected) / bound), got.shape)
        assert (np.abs(got - expected) <= bound).all(), (worst, got[worst], expected[worst])

    @cached_property
    def filter_host(self) -> tuple[Any, Any]:
        """Weight [D, 1, K] and bias [D], float64 on the host."""
        return self.weight.double().cpu().numpy()[:, None], self.bias.double().cpu().numpy()

    def expect_window(self, window: Any, slot: int, x: Any) -> None:
        position = self.at[slot]
        for token in range(max(0, len(x) - self.rows), len(x)):
            window[slot, (position + token) % self.rows] = x[token]

    def live(self, slot: int) -> Any:
        """The taps the next token of a slot will see, oldest first."""
        position = int(self.position[slot])
        rows = [p % self.rows for p in range(max(position - self.kernel + 1, 0), position)]
        return self.window[slot, rows]


def conv_magnitude(window: Any, position: int, x: Any, weight: Any, bias: Any) -> Any:
    """Sum of the magnitudes of a token's terms, [T, D]: what float32 errors of its sum are relative to."""
    rows, taps = len(window), weight.shape[-1]
    total = np.tile(np.abs(bias), (len(x), 1))
    for t in range(len(x)):
        now = position + t
        window[now % rows] = x[t]
        for j in range(taps):
            source = now - (taps - 1) + j
            if source >= 0:
                total[t] += np.abs(weight[:, 0, j] * window[source % rows])
    return total
