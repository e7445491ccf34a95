"""How many bytes a step must move and a slot must hold: the floor that kernels are measured against.

Two counts. The paper's own (Eq. 13, 15, 16: one head, keys not shared) to compare with its numbers; and the exact one
of this package's records, per row and layer, in which the heads of a group share a key. Both leave out what every
method moves alike: the step's inputs and outputs (`StepBytes.io` has them), the convolution and the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from trtllm_replayssm.config import MAX_WINDOW, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.shapes import ModelGeometry, SsmKind, SsmShape
from trtllm_replayssm.spec.cursors import Cursors, commit, flushes

_CURSOR_BYTES = 3 * 4 + 8  # origin, h and position int32, seed int64


def paper_window_bytes(window: int, head_dim: int, state_dim: int) -> tuple[int, int]:
    """(conventional, replay) bytes of one Mamba-2 head over one window of plain decoding, float32 state (Eq. 13)."""
    elems, record = head_dim * state_dim, 2 * head_dim + 2 * state_dim + 4
    replay = 4 * (window + 1) * elems + (window - 1) * (window + 2) // 2 * record
    return 8 * window * elems, replay


def paper_bytes_per_token(
    window: float, state_bytes: float, record_bytes: float, step_tokens: float, mean_accepted: float
) -> float:
    """f(L) of Eq. 15: bytes per committed token at T = step_tokens and a mean of `mean_accepted` committed a step."""
    m, r, t, a = state_bytes, record_bytes, step_tokens, mean_accepted
    return m / a + m / window + r * window / (2 * a) - r / 2 + r * t / a - r * t / window


def paper_best_window(state_bytes: float, record_bytes: float, step_tokens: float, mean_accepted: float) -> float:
    """L* of Eq. 16, where f'(L) = 0."""
    return math.sqrt(2.0 * mean_accepted * (state_bytes / record_bytes - step_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of one step of one row and layer. io: the operation's own inputs and outputs, not part of `total`."""

    state_read: int = 0
    state_write: int = 0
    ring_read: int = 0
    ring_write: int = 0
    io: int = 0

    @property
    def total(self) -> int:
        """State and ring traffic."""
        return self.state_read + self.state_write + self.ring_read + self.ring_write


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Bytes of one token's record in one layer, by part.

    key: k, its factor and the log-decay (Mamba-2: k and dt). value: x, or the float16 correction.
    raw: v and beta of a re-deriving GDN pool, else 0.
    """

    key: int
    value: int
    raw: int

    @property
    def total(self) -> int:
        """What an append writes."""
        return self.key + self.value + self.raw


def record_bytes(shape: SsmShape, config: ReplayConfig, act_itemsize: int) -> RecordBytes:
    """The record of `spec.replay.Record` as it is stored; act_itemsize: bytes of an activation element."""
    if shape.kind is SsmKind.MAMBA2:
        key = shape.key_channels * act_itemsize + 4 * shape.heads
        return RecordBytes(key=key, value=shape.inner * act_itemsize, raw=0)
    key = shape.key_channels * act_itemsize + 4 * shape.groups + 4 * shape.heads
    raw = shape.inner * act_itemsize + 4 * shape.heads if config.rederives else 0
    return RecordBytes(key=key, value=2 * shape.inner, raw=raw)


def state_bytes(shape: SsmShape, fmt: StateFormat) -> int:
    """One copy of one layer's state with its scales."""
    return shape.heads * fmt.bytes_per_head(shape.head_dim, shape.state_dim)


def io_bytes(shape: SsmShape, num_tokens: int, act_itemsize: int) -> int:
    """Inputs and outputs of the operation: x, k, q, dt, o (Mamba-2) or q, k, v, a, b, o (GDN), all activations."""
    gates = shape.heads if shape.kind is SsmKind.MAMBA2 else 2 * shape.heads
    return num_tokens * act_itemsize * (shape.conv_channels + gates + shape.inner)


def step_bytes(shape: SsmShape, config: ReplayConfig, h: int, num_tokens: int, act_itemsize: int) -> StepBytes:
    """A replay step of num_tokens with h committed records; nothing when num_tokens is 0.

    A non-flush step reads the copy that serves outputs, keys and values of h records, and writes num_tokens records. A
    flush reads the recurrence checkpoint (a re-deriving one raw inputs instead of corrections) and writes every copy.
    """
    if not 0 <= h <= config.window or not 0 <= num_tokens <= config.max_step_tokens:
        raise ContractError(
            "step_bytes",
            "h, num_tokens",
            expected=f"h in 0..{config.window} and num_tokens in 0..{config.max_step_tokens}",
            got=(h, num_tokens),
        )
    if num_tokens == 0:
        return StepBytes()
    record = record_bytes(shape, config, act_itemsize)
    recurrence = state_bytes(shape, config.recurrence)
    read_copy = 0 if config.read is None else state_bytes(shape, config.read)
    ring_write = num_tokens * record.total
    io = io_bytes(shape, num_tokens, act_itemsize)
    if not flushes(config, h, num_tokens):
        ring_read = h * (record.key + record.value)
        return StepBytes(state_read=read_copy or recurrence, ring_read=ring_read, ring_write=ring_write, io=io)
    return StepBytes(
        state_read=recurrence,
        state_write=recurrence + read_copy,
        ring_read=h * (record.key + (record.raw or record.value)),
        ring_write=ring_write,
        io=io,
    )


def conventional_step_bytes(shape: SsmShape, state: StateFormat, num_tokens: int, act_itemsize: int) -> StepBytes:
    """A conventional step: one read, and one write per token, as each drafted token has its own snapshot (Table 3)."""
    size = state_bytes(shape, state)
    return StepBytes(
        state_read=size if num_tokens else 0,
        state_write=num_tokens * size,
        io=io_bytes(shape, num_tokens, act_itemsize),
    )


def prompt_bytes(shape: SsmShape, config: ReplayConfig, num_tokens: int, act_itemsize: int) -> StepBytes:
    """A prompt of num_tokens behind a state without records: the state is read once, every copy written once."""
    recurrence = state_bytes(shape, config.recurrence)
    read_copy = 0 if config.read is None else state_bytes(shape, config.read)
    return StepBytes(
        state_read=recurrence,
        state_write=recurrence + read_copy,
        io=io_bytes(shape, num_tokens, act_itemsize),
    )


def window_bytes_per_token(
    shape: SsmShape, config: ReplayConfig, step_tokens: int, mean_accepted: float, act_itemsize: int = 2
) -> float:
    """Mean bytes per committed token of one layer, in steps of step_tokens that commit `mean_accepted` on average.

    Acceptances are spread evenly (3, 4, 3, 4, ... for 3.5; the mean is taken to the nearest 1/100) and cursors move as
    `spec.cursors` says, until a state returns: the average over that cycle is exact, early flushes included.
    """
    if not 1 <= mean_accepted <= step_tokens <= config.max_step_tokens:
        raise ContractError(
            "window_bytes_per_token",
            "mean_accepted, step_tokens",
            expected=f"1 <= mean_accepted <= step_tokens <= T_max = {config.max_step_tokens}",
            got=(mean_accepted, step_tokens),
        )
    mean = Fraction(mean_accepted).limit_denominator(100)
    cursors, moved, step = Cursors(), 0, 0
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    while (cursors.h, step % mean.denominator) not in seen:
        seen[cursors.h, step % mean.denominator] = (moved, cursors.position)
        moved += step_bytes(shape, config, cursors.h, step_tokens, act_itemsize).total
        accepted = math.floor((step + 1) * mean) - math.floor(step * mean)
        commit(config, cursors, step_tokens, accepted)
        step += 1
    moved_before, position_before = seen[cursors.h, step % mean.denominator]
    return (moved - moved_before) / (cursors.position - position_before)


def best_window(
    shape: SsmShape, config: ReplayConfig, step_tokens: int, mean_accepted: float, act_itemsize: int = 2
) -> int:
    """The window in step_tokens..64 that moves the fewest bytes per committed token; the smallest of equals.

    Formats are those of `config`; its window and T_max are not used.
    """

    def cost(window: int) -> float:
        candidate = replace(config, window=window, max_step_tokens=step_tokens)
        return window_bytes_per_token(shape, candidate, step_tokens, mean_accepted, act_itemsize)

    return min(range(step_tokens, MAX_WINDOW + 1), key=cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBytes:
    """Device memory of one slot over all layers, by kind. snapshots: the further states of a conventional slot."""

    checkpoint: int
    read_copy: int = 0
    snapshots: int = 0
    rings: int = 0
    conv_windows: int
    kv: int
    cursors: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        state = self.checkpoint + self.read_copy + self.snapshots
        return state + self.rings + self.conv_windows + self.kv + self.cursors


def slot_bytes(geometry: ModelGeometry, config: ReplayConfig, pool: PoolConfig) -> SlotBytes:
    """A replay slot: checkpoints in one or two precisions, rings of L + T_max records, windows, KV cache, cursors."""
    shape, itemsize, layers = geometry.ssm, pool.activation.itemsize, len(geometry.ssm_layers)
    return SlotBytes(
        checkpoint=layers * state_bytes(shape, config.recurrence),
        read_copy=0 if config.read is None else layers * state_bytes(shape, config.read),
        rings=layers * config.ring_rows * record_bytes(shape, config, itemsize).total,
        conv_windows=layers * config.conv_rows(shape.conv_kernel) * shape.conv_channels * itemsize,
        kv=_kv_bytes(geometry, pool),
        cursors=_CURSOR_BYTES,
    )


def conventional_slot_bytes(
    geometry: ModelGeometry, state: StateFormat, max_step_tokens: int, pool: PoolConfig
) -> SlotBytes:
    """A conventional slot: one state per token of a step (paper, Appendix A), and a window that can roll back."""
    shape, layers = geometry.ssm, len(geometry.ssm_layers)
    rows = shape.conv_kernel - 1 + max_step_tokens - 1
    return SlotBytes(
        checkpoint=layers * state_bytes(shape, state),
        snapshots=(max_step_tokens - 1) * layers * state_bytes(shape, state),
        conv_windows=layers * rows * shape.conv_channels * pool.activation.itemsize,
        kv=_kv_bytes(geometry, pool),
    )


def _kv_bytes(geometry: ModelGeometry, pool: PoolConfig) -> int:
    """Keys and values of all attention layers, the MTP head's included, for max_seq_len positions."""
    return 2 * len(geometry.kv_layers) * geometry.attention.kv_size * pool.max_seq_len * pool.activation.itemsize
