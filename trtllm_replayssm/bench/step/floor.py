"""The byte floor of a whole step: what it must move at least, whatever the kernels are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from trtllm_replayssm.bench.step.cases import StepCase
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.spec import traffic
from trtllm_replayssm.weights.sizes import FormatOf, StepParameter, step_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Bytes of one step of all rows, a mean over a window.

    weights: read once (experts: those that are expected to be chosen). states: states and records of the recurrent
    layers. windows: convolution inputs, read and written. kv: keys and values of the context, read. logits: written.
    """

    weights: float
    states: float
    windows: float
    kv: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))

    def bound(self, parameters: Iterable[StepParameter], bandwidth: float, rate: float) -> float:
        """Seconds that a step takes at least when its matrix products run at `rate` operations a second: of each
        parameter the longer of reading and of multiplying, as one product follows another, and all other bytes at the
        bandwidth.
        """
        products = sum(max(p.read / bandwidth, 2.0 * p.multiplications / rate) for p in parameters)
        return products + (self.total - self.weights) / bandwidth

    def fields(self) -> dict[str, int]:
        """Whole bytes by kind."""
        return {name: round(size) for name, size in asdict(self).items()}


def step_floor(geometry: ModelGeometry, format_of: FormatOf, case: StepCase, itemsize: int) -> StepFloor:
    """The floor of a case; itemsize: bytes of an activation."""
    shape, rows, layers = geometry.ssm, case.rows, len(geometry.ssm_layers)
    if case.conventional:
        state = float(traffic.conventional_step_bytes(shape, case.replay.recurrence, case.tokens, itemsize).total)
    else:
        per_token = traffic.window_bytes_per_token(shape, case.replay, case.tokens, case.accepted, itemsize)
        state = per_token * case.accepted
    taps = shape.conv_kernel - 1 + case.tokens
    attention_layers = len([layer for layer in geometry.kv_layers if layer < len(geometry.layers)])
    return StepFloor(
        weights=step_weight_bytes(geometry, format_of, itemsize, rows * case.tokens),
        states=rows * layers * state,
        windows=rows * layers * taps * shape.conv_channels * itemsize,
        kv=rows * attention_layers * 2 * geometry.attention.kv_size * (case.context + case.tokens) * itemsize,
        logits=logits_bytes(geometry, rows * case.tokens),
    )  # fmt: skip


def logits_bytes(geometry: ModelGeometry, tokens: int) -> int:
    """Float32 logits of `tokens` tokens."""
    return tokens * geometry.vocab * 4


def slot_state_bytes(geometry: ModelGeometry, case: StepCase, activation: ActivationDtype) -> int:
    """Recurrent state of one slot: checkpoints and records, or one state per token of a step, the least that a
    conventional verifier can return to (our pool keeps one more).
    """
    pool = PoolConfig(slots=1, max_seq_len=1, activation=activation)
    if case.conventional:
        slot = traffic.conventional_slot_bytes(geometry, case.replay.recurrence, case.tokens, pool)
    else:
        slot = traffic.slot_bytes(geometry, case.replay, pool)
    return slot.checkpoint + slot.read_copy + slot.snapshots + slot.rings
