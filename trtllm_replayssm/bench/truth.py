"""What a benchmark problem's launch must give, from the stored bytes, token by token (paper, Eq. 1 and 9).

By no operation of the package. In float64 it is the truth; in float32 it is the plain formula whose loss bounds a
kernel's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import Operation
from trtllm_replayssm.bench.problem import Problem
from trtllm_replayssm.bench.rounding import FLOAT16, step
from trtllm_replayssm.shapes import L2_EPS, SsmKind


class Summed(NamedTuple):
    """A sum, and the same sum of its terms' magnitudes."""

    value: Tensor
    magnitude: Tensor


class Expected(NamedTuple):
    """Outputs [B, T, H, P] and what the rounding of corrections may move them by, and the states [B, H, P, N] that must
    be written: none without a flush, behind a prompt one, behind a conventional step one a token.
    """

    outputs: Summed
    rounding: Tensor
    states: list[Tensor]


class Corrections:
    """How far the corrections of a step's tokens may be from exact ones, because the contract rounds them to float16.

    A kernel's correction lies within half a step of the exact one, and within what the earlier ones' roundings move it.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._errors: list[Tensor] = []

    def decay(self, log_decay: Tensor) -> None:
        """Every correction is as old as the next token: log_decay [B, H]."""
        self._errors = [error * log_decay.exp()[..., None] for error in self._errors]

    def moved(self, vector: Tensor) -> Tensor:
        """[B, H, P]: how much a read of the state by `vector` [B, H, N] may be off."""
        parts = [(k * vector).sum(-1).abs()[..., None] * e for k, e in zip(self._keys, self._errors, strict=True)]
        return torch.stack(parts).sum(0)

    def append(self, key: Tensor, correction: Tensor, beta: Tensor) -> None:
        """One token: key [B, H, N], correction [B, H, P], beta [B, H]."""
        error = 0.5 * step(correction, FLOAT16)
        if self._keys:
            error = error + beta[..., None] * self.moved(key)
        self._keys.append(key)
        self._errors.append(error)


class Truth:
    """The rows of one problem, from what is stored before the launch."""

    def __init__(self, problem: Problem, h: int, dtype: torch.dtype = torch.float64) -> None:
        self.problem, self.h, self.dtype = problem, h, dtype
        self.case, self.gdn = problem.case, problem.case.shape.kind is SsmKind.GDN
        self.slot = problem.slots[0].long()
        self.repeat = self.case.shape.heads_per_group
        self.inputs = {name: tensor.to(dtype) for name, tensor in problem.inputs.items()}
        self.corrections = Corrections()

    def step(self) -> Expected:
        """Of one launch."""
        if self.problem.states is not None:
            shape = self.case.shape
            stored = self.problem.states[self.slot, 0].unflatten(-1, (shape.head_dim, shape.state_dim))
            return self.outputs(self.start(stored))
        state, flushed = self._committed()
        expected = self.outputs(state)
        if self.problem.prompt:
            return expected
        return expected._replace(states=[state.value] if flushed else [])

    def outputs(self, state: Summed) -> Expected:
        """Of the launch's tokens from a state; with the last state, of a conventional step with each."""
        outputs, rounding = [], []
        states: list[Tensor] = []
        for token in range(self.case.tokens):
            out, state = self.token(state, token)
            outputs.append(out)
            rounding.append(self.rounding(token))
            states = [*(states if self.case.operation is Operation.CONVENTIONAL else ()), state.value]
        stacked = Summed(*(torch.stack(part, dim=1) for part in zip(*outputs, strict=True)))
        return Expected(stacked, torch.stack(rounding, dim=1), states)

    def rounding(self, token: int) -> Tensor:
        """[B, H, P]: how far rounded corrections of this launch may move the output of `token`, the last one made."""
        if not self.gdn or self.case.operation is not Operation.UPDATE:
            return torch.zeros_like(self.inputs["value"][:, token])
        return self.corrections.moved(_scaled_query(self._heads(self.inputs["q"][:, token])))

    def start(self, state: Tensor) -> Summed:
        """A state [B, H, P, N] as it is stored: one term an element."""
        return Summed(state.to(self.dtype), state.to(self.dtype).abs())

    def _committed(self) -> tuple[Summed, bool]:
        """The state with the committed records, and whether the step folds them."""
        layer = self.problem.state
        assert layer is not None
        flushed = self.problem.prompt or self.h + self.case.tokens > self.case.window
        source = layer.checkpoint if flushed or layer.read_copy is None else layer.read_copy
        return self.fold(self.start(source.load(self.slot)), flushed), flushed

    def fold(self, state: Summed, flushed: bool) -> Summed:
        """`state` with the committed records, as a flush or a read takes them."""
        layer = self.problem.state
        assert layer is not None
        origin = self.problem.cursors.origin[self.slot].long()
        for j in range(self.h):
            row = (origin + j) % self.case.config.ring_rows
            key = self._heads(self._record(layer.ring_key, row))
            value, decay = self._record(layer.ring_value, row), self._record(layer.ring_decay, row)
            if not self.gdn:
                value, decay = value * decay[..., None], decay * self.inputs["a"]
            else:
                assert layer.ring_key_factor is not None
                key = key * self._heads(self._record(layer.ring_key_factor, row)[..., None])
                if flushed and layer.ring_v is not None and layer.ring_beta is not None:
                    raw = self._record(layer.ring_v, row), self._record(layer.ring_beta, row)
                    value = _correction(state, key, decay, *raw)
            state = _apply(state, key, value, decay)
        return state

    def _record(self, ring: Tensor, row: Tensor) -> Tensor:
        """[B, ...] of a ring [S, heads, C, ...]: each sequence's own row."""
        return ring[self.slot, :, row].to(self.dtype)

    def token(self, state: Summed, token: int) -> tuple[Summed, Summed]:
        """Output [B, H, P] of one of the inputs' tokens, and the state after it."""
        inputs = {name: tensor[:, token] for name, tensor in self.inputs.items() if name not in ("a", "skip")}
        key, query, value = self._heads(inputs["k"]), self._heads(inputs["q"]), inputs["value"]
        if self.gdn:
            key = key / (key.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
            query = _scaled_query(query)
            value = _correction(state, key, inputs["log_decay"], value, inputs["beta"])
            self.corrections.decay(inputs["log_decay"])
            self.corrections.append(key, value, inputs["beta"])
            state = _apply(state, key, value, inputs["log_decay"])
            return _read(state, query), state
        state = _apply(state, key, value * inputs["dt"][..., None], inputs["dt"] * self.inputs["a"])
        out, skip = _read(state, query), self.inputs["skip"][:, None] * value
        return Summed(out.value + skip, out.magnitude + skip.abs()), state

    def _heads(self, groups: Tensor) -> Tensor:
        """[B, G, n] -> [B, H, n]."""
        return groups.repeat_interleave(self.repeat, dim=1)


def _scaled_query(query: Tensor) -> Tensor:
    return query / ((query.square().sum(-1, keepdim=True) + L2_EPS) * query.shape[-1]).sqrt()


def _product(state: Tensor, vector: Tensor) -> Tensor:
    return (state @ vector[..., None])[..., 0]


def _read(state: Summed, vector: Tensor) -> Summed:
    return Summed(_product(state.value, vector), _product(state.magnitude, vector.abs()))


def _apply(state: Summed, key: Tensor, value: Tensor, log_decay: Tensor) -> Summed:
    decay, change = log_decay.exp()[..., None, None], value[..., :, None] * key[..., None, :]
    return Summed(decay * state.value + change, decay * state.magnitude + change.abs())


def _correction(state: Summed, key: Tensor, log_decay: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    return beta[..., None] * (value - log_decay.exp()[..., None] * _product(state.value, key))
