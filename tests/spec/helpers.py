"""Small shapes, random inputs and the conventional recurrence, for the tests of the recurrent specification."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec import ssm
from trtllm_replayssm.spec.cursors import Cursors, commit
from trtllm_replayssm.spec.replay import Record, ReplayLayer, StepInputs

LAYER = 3
SEED = 1234567
KINDS = [SsmKind.MAMBA2, SsmKind.GDN]


def small_shape(kind: SsmKind, *, heads: int = 4, groups: int = 2, head_dim: int = 3, state_dim: int = 5) -> SsmShape:
    return SsmShape(
        kind=kind, heads=heads, groups=groups, head_dim=head_dim, state_dim=state_dim, conv_kernel=4, conv_bias=False
    )


def random_inputs(shape: SsmShape, tokens: int, seed: int = 0, slowest: float = 0.02) -> StepInputs:
    """Inputs whose heads decay at rates from `slowest` to about 1 per token; all exact in float32."""
    rng = np.random.default_rng(seed)

    def f32(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(np.float64)

    k = f32(rng.normal(size=(tokens, shape.groups, shape.state_dim)))
    q = f32(rng.normal(size=(tokens, shape.groups, shape.state_dim)))
    value = f32(rng.normal(size=(tokens, shape.heads, shape.head_dim)))
    rates = np.geomspace(slowest, 1.0, shape.heads)
    if shape.kind is SsmKind.MAMBA2:
        dt = f32(rng.uniform(0.1, 1.5, size=(tokens, shape.heads)))
        return StepInputs(k, q, value, -dt * f32(rates), dt=dt)
    g = f32(-rates * rng.uniform(0.1, 1.5, size=(tokens, shape.heads)))
    return StepInputs(k, q, value, g, beta=f32(rng.uniform(0.05, 0.95, size=(tokens, shape.heads))))


def part(inputs: StepInputs, start: int, stop: int) -> StepInputs:
    """Tokens start..stop-1."""
    take = slice(start, stop)
    return StepInputs(
        inputs.k[take], inputs.q[take], inputs.value[take], inputs.log_decay[take],
        None if inputs.dt is None else inputs.dt[take], None if inputs.beta is None else inputs.beta[take],
    )  # fmt: skip


def joined(first: StepInputs, second: StepInputs) -> StepInputs:
    def cat(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
        return None if a is None or b is None else np.concatenate([a, b])

    names = ("k", "q", "value", "log_decay", "dt", "beta")
    return StepInputs(*[cat(getattr(first, n), getattr(second, n)) for n in names])  # type: ignore[arg-type]


def conventional(
    shape: SsmShape, inputs: StepInputs, state: np.ndarray | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs [T, H, P] and the state before and after each token (T + 1 of them), by `ssm`'s one-token steps."""
    states = [np.zeros((shape.heads, shape.head_dim, shape.state_dim)) if state is None else state]
    outputs = []
    for t in range(len(inputs.k)):
        k, q, value, decay = inputs.k[t], inputs.q[t], inputs.value[t], inputs.log_decay[t]
        if shape.kind is SsmKind.MAMBA2:
            assert inputs.dt is not None
            a = np.divide(decay, inputs.dt[t])
            out, new = ssm.mamba2_step(shape, states[-1], value, k, q, inputs.dt[t], a)
        else:
            assert inputs.beta is not None
            out, new = ssm.gdn_step(shape, states[-1], k, q, value, decay, inputs.beta[t])
        outputs.append(out)
        states.append(new)
    return np.array(outputs).reshape(-1, shape.heads, shape.head_dim), states


@dataclass
class Sequence:
    """One layer of one sequence with its cursors; `step` runs and commits."""

    layer: ReplayLayer
    cursors: Cursors

    @staticmethod
    def new(shape: SsmShape, config: ReplayConfig, *, exact: bool = False, seed: int = SEED) -> Sequence:
        return Sequence(ReplayLayer(shape, config, LAYER, exact), Cursors(seed=seed))

    def step(self, inputs: StepInputs, accepted: int | None = None) -> np.ndarray:
        tokens = len(inputs.k)
        out = self.layer.step(self.cursors, inputs)
        commit(self.layer.config, self.cursors, tokens, tokens if accepted is None else accepted)
        return out

    def run(self, inputs: StepInputs, split: list[int]) -> np.ndarray:
        """All tokens in steps of the sizes in `split`, everything accepted."""
        assert sum(split) == len(inputs.k)
        bounds = np.cumsum([0, *split])
        return np.concatenate([self.step(part(inputs, a, b)) for a, b in pairwise(bounds)])

    def committed(self) -> list[Record]:
        rows = [self.layer.ring[self.cursors.row(self.layer.config, j)] for j in range(self.cursors.h)]
        assert all(r is not None for r in rows)
        return [r for r in rows if r is not None]

    def state(self) -> np.ndarray:
        return self.layer.fold(self.cursors)


def assert_records_equal(a: list[Record], b: list[Record]) -> None:
    """Bit for bit, in every field."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in ("key", "key_factor", "log_decay", "value", "weight", "v", "beta"):
            left, right = getattr(x, name), getattr(y, name)
            assert (left is None) == (right is None), name
            assert left is None or np.array_equal(left, right), name


def even_split(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])
