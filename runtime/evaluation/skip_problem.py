"""One layer's step on the device with given decays, by the update and by the update that skips faded heads.

The rest of the records is random: bytes and times depend on the decays alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.launches import TunedLaunch, UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.native import NativeOps
from trtllm_replayssm.ops.native_library import find_library, load_library
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.traffic import state_bytes

_NEAR = 1e-4  # of a threshold's logarithm: further away no order of adding float32 numbers decides


@dataclass(frozen=True)
class SkipCase:
    """log_decays [rows, L + 1, H] float32: of each token since the checkpoint was written, the step's own last.

    skip_below: the threshold; name: what the decays are.
    """

    name: str
    log_decays: Tensor
    skip_below: float

    def faded(self, h: int, window: int) -> Tensor:
        """Heads that do without their checkpoint after h committed records, [rows, H] bool (`spec.decay_skip`)."""
        return self._sums(h, window) <= math.log(self.skip_below)

    def is_clear(self, h: int, window: int) -> bool:
        """Whether any order of adding the log-decays finds the same heads faded."""
        return not bool(((self._sums(h, window) - math.log(self.skip_below)).abs() < _NEAR).any())

    def _sums(self, h: int, window: int) -> Tensor:
        return self.log_decays[:, : h if h + 1 > window else h + 1].sum(1)


def even_case(rows: int, heads: int, window: int, share: float, skip_below: float, device: torch.device) -> SkipCase:
    """A share of the heads forgets within a token, the others not at all."""
    decays = torch.full((rows, window + 1, heads), -1e-3, device=device)
    decays[..., : round(share * heads)] = -30.0
    return SkipCase(f"{share:.0%} of the heads fade", decays, skip_below)


def measured_case(
    name: str, log_decays: Tensor, rows: int, window: int, skip_below: float, device: torch.device
) -> SkipCase:
    """Windows of decays that a checkpoint has: log_decays [tokens, layers, texts, H], starts drawn by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    tokens, layers, texts, heads = log_decays.shape
    series = log_decays.permute(1, 2, 0, 3).reshape(layers * texts, tokens, heads)
    chosen = torch.randint(len(series), (rows,), generator=generator)
    start = torch.randint(tokens - window, (rows,), generator=generator)
    places = start[:, None] + torch.arange(window + 1)
    return SkipCase(name, series[chosen[:, None], places].float().to(device), skip_below)


class SkipProblem:
    """A Mamba-2 layer of B rows with float32 states and bfloat16 activations, plain decoding."""

    def __init__(self, shape: SsmShape, rows: int, window: int, device: torch.device) -> None:
        """Raises ConfigError for another family, or without the kernels."""
        path = find_library()
        if shape.kind is not SsmKind.MAMBA2 or path is None:
            raise ConfigError(
                "eval skip", "shape", expected="a Mamba-2 layer, and the native library",
                got=f"{shape.kind.value}, library {path}", hint="docs/kernels.md says how to build the library",
            )  # fmt: skip
        self.shape, self.rows, self.window = shape, rows, window
        config = ReplayConfig(window=window)
        self._state = ReplayLayerState.allocate(shape, config, 0, rows, torch.bfloat16, device)
        self._cursors = CursorTensors.allocate(rows, device)
        self._native = NativeOps(load_library(path), device)
        unsupported = self._native.unsupported(self._state, self._cursors, torch.bfloat16)
        if unsupported is not None:
            raise ConfigError("eval skip", "shape", expected="one that the kernels serve", got=unsupported)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._rows = StepRows(slots, torch.ones_like(slots))
        generator = torch.Generator(device).manual_seed(1)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=device)

        for tensor in (self._state.checkpoint.data, self._state.ring_value, self._state.ring_key):
            tensor.copy_(random(*tensor.shape))
        self._inputs = {
            "x": random(rows, 1, shape.heads, shape.head_dim).bfloat16(),
            "k": random(rows, 1, shape.groups, shape.state_dim).bfloat16(),
            "q": random(rows, 1, shape.groups, shape.state_dim).bfloat16(),
        }
        self._dt = torch.zeros((rows, 1, shape.heads), device=device)
        self._rate = -torch.ones(shape.heads, device=device)

    @property
    def state_bytes(self) -> int:
        """Bytes of all rows' checkpoints: what a step without skipping reads of them."""
        return self.rows * state_bytes(self.shape, StateFormat.FLOAT32)

    def place(self, case: SkipCase, h: int) -> None:
        """Give every row h committed records and a token with the case's decays."""
        self._cursors.h.fill_(h)
        self._state.ring_decay[:, :, :h] = -case.log_decays[:, :h].transpose(1, 2)
        self._dt[:, 0] = -case.log_decays[:, h]

    def equal_bits(self, case: SkipCase, h: int) -> bool:
        """Place a step; whether skipping gives, bit for bit, outputs and states of the update with zero in place of
        the faded checkpoints, which hold NaN meanwhile. Leaves the checkpoints as they were.
        """
        self.place(case, h)
        faded, checkpoint = case.faded(h, self.window), self._state.checkpoint.data
        before = checkpoint.clone()
        checkpoint[faded] = float("nan")
        held = checkpoint.clone()
        out = self.step(case.skip_below)
        written = checkpoint.clone()
        equal = False
        for kernel in (UpdateKernel.STREAMED, UpdateKernel.DIRECT):  # the skipping ones are made of these
            checkpoint.copy_(before)
            checkpoint[faded] = 0.0
            judged = self.step(None, kernel)
            # a step that does not flush leaves every checkpoint as it is
            states = checkpoint if h + 1 > self.window else held
            equal = torch.equal(out, judged) and torch.equal(written.view(torch.int32), states.view(torch.int32))
            if equal:
                break
        checkpoint.copy_(before)
        return equal and bool(out.isfinite().all())

    def step(self, skip_below: float | None, kernel: UpdateKernel | None = None) -> Tensor:
        """Run the step that was placed; None: the plain update, by `kernel` if that is named, by the library's choice
        if not. A flush folds anew each time.
        """
        state = self._state
        if kernel is not None:
            launch = TunedLaunch(rows=self.rows, tokens=1, launch=UpdateLaunch(kernel=kernel))
            state = replace(state, config=replace(state.config, launches=(launch,)))
        x, k, q = (self._inputs[name] for name in "xkq")
        return self._native.mamba2_update(
            state, self._cursors, self._rows, x, k, q, self._dt, self._rate, d_skip=self._rate, skip_below=skip_below
        )
