"""ReplaySSM for one layer of one sequence: checkpoint, ring of records, output-only evaluation, flush.

Replay is Eq. 5, OutputOnly Eq. 6, the GDN corrections Eq. 10 by forward substitution, the two-precision step
Algorithms 3 and 6. All arithmetic is float64; values are rounded only where the contract stores them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import FP16_MAX, Rounding, StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.cursors import Cursors, flushes
from trtllm_replayssm.spec.decay_skip import faded
from trtllm_replayssm.spec.formats import StoredState, encode
from trtllm_replayssm.spec.philox import state_words
from trtllm_replayssm.spec.ssm import l2_norm_factor, to_heads

Array = NDArray[np.float64]


@dataclass(slots=True)
class Record:
    """What the ring keeps of one token.

    Mamba-2: value = x [H, P], weight = dt [H] float32. GDN: value = the correction u [H, P] (float16), weight = None,
    and v [H, P], beta [H] float32 when flushes re-derive. key: [G, N] raw; key_factor: [G] float32 (1 for Mamba-2);
    log_decay: [H], per token, never cumulative: float32 for GDN, dt * A unrounded for Mamba-2 (dt is what is stored).
    """

    key: Array
    key_factor: Array
    log_decay: Array
    value: Array
    weight: Array | None = None
    v: Array | None = None
    beta: Array | None = None


@dataclass(slots=True)
class StepInputs:
    """T tokens of one row, already in the activation dtype where the contract has one.

    Mamba-2: value = x [T, H, P], dt [T, H] after softplus. GDN: value = v, beta [T, H].
    k, q: [T, G, N] after the convolution; log_decay: [T, H].
    """

    k: Array
    q: Array
    value: Array
    log_decay: Array
    dt: Array | None = None
    beta: Array | None = None


def as_float32(x: Array) -> Array:
    """The values of x as a float32 buffer keeps them."""
    return x.astype(np.float32).astype(np.float64)


def round_correction(u: Array) -> Array:
    """A correction as it is stored and used: float16, saturated."""
    return np.clip(u, -FP16_MAX, FP16_MAX).astype(np.float16).astype(np.float64)


@dataclass
class ReplayLayer:
    """State of one SSM layer of one sequence, and the steps over it.

    exact=True keeps float64 checkpoints and records, for identities; otherwise both are stored as the contract says.
    carry: the float32 state between two chunks of one prompt, None outside a prompt.
    """

    shape: SsmShape
    config: ReplayConfig
    layer: int
    exact: bool = False
    checkpoint: Array = field(init=False)
    stored: StoredState | None = field(init=False, default=None)
    stored_read: StoredState | None = field(init=False, default=None)
    ring: list[Record | None] = field(init=False)
    carry: Array | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.checkpoint = np.zeros((self.shape.heads, self.shape.head_dim, self.shape.state_dim))
        self.ring = [None] * self.config.ring_rows

    def write_checkpoint(self, state: Array, cursors: Cursors, position: int) -> None:
        """Store both copies, each from the same float32 state; `position` tokens are absorbed by it."""
        if self.exact:
            self.checkpoint = state
            return
        config = self.config
        words = None
        if config.recurrence_rounding is Rounding.STOCHASTIC and config.recurrence is not StateFormat.FLOAT32:
            elems = self.shape.head_dim * self.shape.state_dim
            words = state_words(
                cursors.seed, self.layer, self.shape.heads, elems, position, first_head=self.shape.first_head
            )
        self.stored = encode(state, config.recurrence, config.recurrence_rounding, words)
        self.checkpoint = self.stored.decode().astype(np.float64)
        if config.read is not None:
            self.stored_read = encode(state, config.read)

    def step(self, cursors: Cursors, inputs: StepInputs, *, skip_below: float | None = None) -> Array:
        """Outputs [T, H, P] of one step; appends the records, folds when the flush rule says so. `commit` follows.

        skip_below: heads whose checkpoint has decayed to this share or less do without it (`spec.decay_skip`).
        """
        num_tokens = len(inputs.k)
        if num_tokens > self.config.max_step_tokens:
            raise ContractError(
                "replay step", "num_tokens", expected=f"at most T_max = {self.config.max_step_tokens}", got=num_tokens
            )
        assert self.carry is None, "a step inside an unfinished prompt"
        if num_tokens == 0:
            return np.zeros((0, self.shape.heads, self.shape.head_dim))
        flush = flushes(self.config, cursors.h, num_tokens)
        source = self.checkpoint
        if not flush and self.stored_read is not None:
            source = self.stored_read.decode().astype(np.float64)
        committed = self._committed(cursors)
        if skip_below is not None:
            decays = [r.log_decay for r in committed] + ([] if flush else [inputs.log_decay[0]])
            source = np.where(faded(decays, skip_below)[:, None, None], 0.0, source)
        if flush and self.shape.kind is SsmKind.GDN and self.config.rederives:
            committed = self._rederive(source, committed)
        records = list(committed)
        outputs = []
        for s in range(num_tokens):
            record = self._record(inputs, s)
            if record.beta is not None:
                u = self._correction(source, records, record)
                record.value = u if self.exact else round_correction(u)
            records.append(record)
            kept = record if self.config.rederives else replace(record, v=None, beta=None)
            self.ring[cursors.row(self.config, cursors.h + s)] = kept
            outputs.append(self._output(source, records, inputs.q[s]))
        if flush:
            self.write_checkpoint(replay(self.shape, source, committed), cursors, cursors.position)
        return np.stack(outputs)

    def prefill(self, cursors: Cursors, inputs: StepInputs, *, last: bool = True) -> Array:
        """Outputs [n, H, P] of a prompt chunk of any length, from the state after all committed records.

        Between chunks the state stays float32; the `last` chunk writes the checkpoint. `finish_prefill` follows.
        """
        state = self.fold(cursors)
        outputs = []
        for s in range(len(inputs.k)):
            record = self._record(inputs, s)
            if record.beta is not None:
                record.value = self._correction(state, [], record)
            state = replay(self.shape, state, [record])
            outputs.append(self._output(state, [], inputs.q[s]))
        if last:
            self.write_checkpoint(state, cursors, cursors.position + len(outputs))
            self.carry = None
        else:
            self.carry = state if self.exact else as_float32(state)
        return np.stack(outputs) if outputs else np.zeros((0, self.shape.heads, self.shape.head_dim))

    def fold(self, cursors: Cursors) -> Array:
        """The state [H, P, N] after all committed records, without storing it."""
        if self.carry is not None:
            return self.carry
        committed = self._committed(cursors)
        if self.shape.kind is SsmKind.GDN and self.config.rederives:
            committed = self._rederive(self.checkpoint, committed)
        return replay(self.shape, self.checkpoint, committed)

    def _committed(self, cursors: Cursors) -> list[Record]:
        """The h committed records, oldest first."""
        committed = []
        for j in range(cursors.h):
            record = self.ring[cursors.row(self.config, j)]
            assert record is not None, "a committed record is missing"
            committed.append(record)
        return committed

    def _record(self, inputs: StepInputs, s: int) -> Record:
        """The record of token s as the ring stores it; a GDN record still lacks its correction (value is v)."""
        stored = (lambda x: x) if self.exact else as_float32
        key, value, log_decay = inputs.k[s], inputs.value[s], inputs.log_decay[s]
        if self.shape.kind is SsmKind.MAMBA2:
            assert inputs.dt is not None
            return Record(key, np.ones(self.shape.groups), log_decay, value, weight=stored(inputs.dt[s]))
        assert inputs.beta is not None
        factor = stored(l2_norm_factor(key))
        return Record(key, factor, stored(log_decay), value, v=value, beta=stored(inputs.beta[s]))

    def _correction(self, source: Array, records: list[Record], record: Record) -> Array:
        """The correction [H, P] of a token behind `records`, unrounded (Eq. 9)."""
        assert record.v is not None and record.beta is not None
        keys = to_heads(self.shape, record.key * record.key_factor[:, None])
        recalled = read_out(self.shape, source, records, keys, record.log_decay)
        return record.beta[:, None] * (record.v - recalled)

    def _rederive(self, source: Array, committed: list[Record]) -> list[Record]:
        """The committed records with corrections computed anew from the high-precision checkpoint (Alg. 6, line 8).

        They live for this flush only and are not rounded to the ring's float16 (paper, Appendix B.4).
        """
        derived: list[Record] = []
        for old in committed:
            record = replace(old)
            record.value = self._correction(source, derived, record)
            derived.append(record)
        return derived

    def _output(self, source: Array, records: list[Record], q: Array) -> Array:
        if self.shape.kind is SsmKind.GDN:
            q = q * l2_norm_factor(q)[:, None] / np.sqrt(self.shape.state_dim)
        return read_out(self.shape, source, records, to_heads(self.shape, q), np.zeros(self.shape.heads))


def decay_sums(records: list[Record], last: Array) -> list[Array]:
    """For each record, the log-decay from it to now: a sum from the newest back, never a difference of prefix sums.

    `last` [H] is the log-decay applied after the newest record. One more entry at the front belongs to the checkpoint.
    """
    sums = [last]
    for record in reversed(records):
        sums.append(sums[-1] + record.log_decay)
    return sums[::-1]


def read_out(shape: SsmShape, source: Array, records: list[Record], vectors: Array, last: Array) -> Array:
    """Output-only evaluation (Eq. 6): the state after `records`, decayed by `last`, times vectors [H, N] -> [H, P]."""
    sums = decay_sums(records, last)
    out: Array = np.exp(sums[0])[:, None] * np.einsum("hpn,hn->hp", source, vectors)
    for record, log_decay in zip(records, sums[1:], strict=True):
        dot = (to_heads(shape, record.key * record.key_factor[:, None]) * vectors).sum(-1)
        out += (np.exp(log_decay) * dot)[:, None] * _update(record)
    return out


def replay(shape: SsmShape, source: Array, records: list[Record]) -> Array:
    """Replay (Eq. 5): the state [H, P, N] after applying `records` to `source`."""
    sums = decay_sums(records, np.zeros(shape.heads))
    state = np.exp(sums[0])[:, None, None] * source
    for record, log_decay in zip(records, sums[1:], strict=True):
        keys = to_heads(shape, record.key * record.key_factor[:, None])
        state = state + (np.exp(log_decay)[:, None] * _update(record))[:, :, None] * keys[:, None, :]
    return state


def _update(record: Record) -> Array:
    """The vector whose outer product with the key enters the state: dt x, or u."""
    return record.value if record.weight is None else record.weight[:, None] * record.value
