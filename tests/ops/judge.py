"""The float64 judge of one step: every value a step computes, from the records and checkpoints it really had.

Oracle O1 (the specification's formulas in float64), fed with what the operation stored before and during the step, so
that a float16 correction that rounds to its other neighbour cannot hide or excuse an error. The same formulas in
float32 (oracle O3) set the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.ops.layers import Layer
from tests.tolerance import FACTOR, FLOAT32_STEP
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.replay import Record, decay_sums, read_out, replay
from trtllm_replayssm.spec.ssm import l2_norm_factor, to_heads

Array = NDArray[Any]


@dataclass
class Computed:
    """outputs [n, H, P]; corrections [n, H, P] unrounded (GDN, else empty); fold [H, P, N] of the committed records."""

    outputs: Array
    corrections: Array
    fold: Array


@dataclass
class Situation:
    """What a step of one row reads: the checkpoint it uses, its committed records, and whether it re-derives them."""

    source: Array
    committed: list[Record]
    rederive: bool


def records_of(layer: Layer, slot: int, start: int, stop: int, dtype: type) -> list[Record]:
    """Ring records start..stop-1 behind the origin, in `dtype`."""
    state, found = layer.state, []
    for place in layer.places(slot, start, stop):

        def load(ring: torch.Tensor | None, place: int = place) -> Array | None:
            return None if ring is None else ring[slot, :, place].to(torch.float64).numpy().astype(dtype)

        key, decay, value = load(state.ring_key), load(state.ring_decay), load(state.ring_value)
        assert key is not None and decay is not None and value is not None
        if layer.shape.kind is SsmKind.MAMBA2:
            rate: Array = layer.a.double().numpy().astype(dtype)
            found.append(Record(key, np.ones(layer.shape.groups, dtype), decay * rate, value, weight=decay))
        else:
            factor = load(state.ring_key_factor)
            assert factor is not None
            found.append(Record(key, factor, decay, value, v=load(state.ring_v), beta=load(state.ring_beta)))
    return found


def situation(layer: Layer, slot: int, count: int, dtype: type) -> Situation:
    """Read before the step."""
    h = int(layer.cursors.h[slot])
    flush = h + count > layer.config.window
    index = torch.tensor([slot])
    read = layer.state.checkpoint if flush or layer.state.read_copy is None else layer.state.read_copy
    source: Array = read.load(index)[0].double().numpy().astype(dtype)
    rederive = flush and layer.shape.kind is SsmKind.GDN and layer.config.rederives
    return Situation(source, records_of(layer, slot, 0, h, dtype), rederive)


def compute(
    shape: SsmShape, before: Situation, drafts: list[Record], v: Array, beta: Array | None, q: Array
) -> Computed:
    """All values of a step, in the type of its arguments. drafts: the records the step stored, corrections included."""
    committed = before.committed
    if before.rederive:
        committed = []
        for old in before.committed:
            assert old.v is not None and old.beta is not None
            value = _correction(shape, before.source, committed, old, old.v, old.beta)
            committed.append(replace(old, value=value))
    outputs, corrections, records = [], [], list(committed)
    for s, draft in enumerate(drafts):
        if beta is not None:
            corrections.append(_correction(shape, before.source, records, draft, v[s], beta[s]))
        records.append(draft)
        query = q[s]
        if shape.kind is SsmKind.GDN:
            query = query * l2_norm_factor(query)[:, None] / np.sqrt(shape.state_dim).astype(query.dtype)
        last = np.zeros(shape.heads, query.dtype)
        outputs.append(read_out(shape, before.source, records, to_heads(shape, query), last))
    empty = np.zeros((0, shape.heads, shape.head_dim))
    return Computed(
        np.array(outputs) if outputs else empty, np.array(corrections) if corrections else empty,
        _fold(shape, before.source, committed),
    )  # fmt: skip


def _fold(shape: SsmShape, source: Array, records: list[Record]) -> Array:
    """Eq. 5: the specification's, or the same formula wholly in float32."""
    if source.dtype == np.float64:
        return replay(shape, source, records)
    sums = decay_sums(records, np.zeros(shape.heads, source.dtype))
    state = np.exp(sums[0])[:, None, None] * source
    for record, log_decay in zip(records, sums[1:], strict=True):
        value = record.value if record.weight is None else record.weight[:, None] * record.value
        keys = to_heads(shape, record.key * record.key_factor[:, None])
        state = state + (np.exp(log_decay)[:, None] * value)[:, :, None] * keys[:, None, :]
    assert state.dtype == source.dtype
    return np.asarray(state)


def _correction(shape: SsmShape, source: Array, records: list[Record], own: Record, v: Array, beta: Array) -> Array:
    keys = to_heads(shape, own.key * own.key_factor[:, None])
    return np.asarray(beta[:, None] * (v - read_out(shape, source, records, keys, own.log_decay)))


@dataclass
class Errors:
    """Largest errors of the operation and of plain float32 over a run, by name."""

    got: dict[str, float] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, got: Array, want: Array, plain: Array) -> None:
        """Compare one result; non-finite values must not occur in these runs."""
        assert want.shape == got.shape == plain.shape, (name, want.shape, got.shape, plain.shape)
        assert np.isfinite(got).all(), name
        if want.size:
            self.got[name] = max(self.got.get(name, 0.0), float(np.abs(got - want).max()))
            self.plain[name] = max(self.plain.get(name, 0.0), float(np.abs(plain - want).max()))
            self.size[name] = max(self.size.get(name, 0.0), float(np.abs(want).max()))

    def check(self) -> None:
        """Twice what plain float32 loses, plus half a float32 step of the largest value."""
        assert self.got, "nothing was compared"
        for name, error in self.got.items():
            bound = FACTOR * self.plain[name] + FLOAT32_STEP / 2 * self.size[name]
            assert error <= bound, (name, error, bound)
