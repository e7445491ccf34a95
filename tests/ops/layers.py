"""One SSM layer of the reference operations with its cursors, random inputs for it, and byte views for comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tolerance import CORRECTION_NOISE, RECURRENCE_NOISE
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.reference import commit, gdn, mamba2
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.shapes import SsmKind, SsmShape

CPU = torch.device("cpu")
LAYER = 3
KINDS = [SsmKind.MAMBA2, SsmKind.GDN]
NAN = float("nan")


@dataclass
class Tokens:
    """B rows of T tokens: k, q [B, T, G, N] and value (x or v) [B, T, H, P] in the activation type; decay (dt or g) and
    beta (None for Mamba-2) [B, T, H] float32.
    """

    k: Tensor
    q: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """The function on every tensor."""
        beta = None if self.beta is None else function(self.beta)
        return Tokens(function(self.k), function(self.q), function(self.value), function(self.decay), beta)

    def span(self, start: int, stop: int) -> Tokens:
        return self.map(lambda t: t[:, start:stop].contiguous())

    def rows(self, index: Sequence[int]) -> Tokens:
        return self.map(lambda t: t[list(index)].contiguous())

    def without(self, slots: Sequence[int], counts: Sequence[int]) -> Tokens:
        """NaN in everything a step must not read: padding rows and tokens beyond a row's count."""
        width = self.k.shape[1]
        live = torch.as_tensor(counts)[:, None] > torch.arange(width)
        live &= torch.as_tensor(slots)[:, None] >= 0
        return self.map(lambda t: t.masked_fill(~live.reshape(*live.shape, *[1] * (t.ndim - 2)), NAN))

    @property
    def width(self) -> int:
        return self.k.shape[1]


def random_tokens(
    shape: SsmShape, rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32, slowest: float = 0.02
) -> Tokens:
    """Heads forget at rates from `slowest` to about one per token."""
    g = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(rows, width, *sizes, generator=g).to(dtype)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, width, shape.heads, generator=g)

    k, q = normal(shape.groups, shape.state_dim), normal(shape.groups, shape.state_dim)
    value, spread = normal(shape.heads, shape.head_dim), uniform(0.1, 1.5)
    if shape.kind is SsmKind.MAMBA2:
        return Tokens(k, q, value, spread, None)
    return Tokens(k, q, value, spread * rates(shape, slowest), uniform(0.05, 0.95))


def rates(shape: SsmShape, slowest: float = 0.02) -> Tensor:
    """a [H] = -exp(A_log): the log-decay of each head for dt = 1."""
    return -torch.logspace(torch.tensor(slowest).log10().item(), 0, shape.heads)


class Layer:
    """A layer's pool of `slots` slots, every request with its own seed, and the steps over it."""

    def __init__(
        self, shape: SsmShape, config: ReplayConfig, slots: int = 1, *, dtype: torch.dtype = torch.float32,
        conventional: bool = False, poisoned: bool = True,
    ) -> None:  # fmt: skip
        self.shape, self.config, self.poisoned = shape, config, poisoned
        self.cursors = CursorTensors.allocate(slots, CPU)
        self.cursors.seed.copy_(torch.arange(1, slots + 1) * 7919)
        self.a = rates(shape)
        self.d_skip = torch.linspace(-1, 1, shape.heads)
        self.conventional: ConventionalLayerState | None = None
        if conventional:
            self.conventional = ConventionalLayerState.allocate(shape, config, LAYER, slots, CPU)
        self.state = ReplayLayerState.allocate(shape, config, LAYER, slots, dtype, CPU)

    def rows(self, slots: Sequence[int], counts: Sequence[int], width: int) -> StepRows:
        total = len(self.cursors.h)
        return step_rows("test", torch.as_tensor(slots), torch.as_tensor(counts), total, width)

    def update(self, tokens: Tokens, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Outputs [B, T, H, P] of a step that still has to be committed."""
        rows = self.rows(slots, counts, tokens.width)
        if self.poisoned:
            self.poison()
            tokens = tokens.without(slots, counts)
        if self.shape.kind is SsmKind.MAMBA2:
            mamba = (tokens.value, tokens.k, tokens.q, tokens.decay, self.a)
            if self.conventional is not None:
                return mamba2.mamba2_conventional(self.conventional, self.cursors, rows, *mamba, d_skip=self.d_skip)
            return mamba2.mamba2_update(self.state, self.cursors, rows, *mamba, d_skip=self.d_skip)
        assert tokens.beta is not None
        delta = (tokens.q, tokens.k, tokens.value, tokens.decay, tokens.beta)
        if self.conventional is not None:
            return gdn.gdn_conventional(self.conventional, self.cursors, rows, *delta)
        return gdn.gdn_update(self.state, self.cursors, rows, *delta)

    def commit(self, slots: Sequence[int], counts: Sequence[int], accepted: Sequence[int], width: int) -> None:
        move = commit.commit if self.conventional is None else commit.commit_conventional
        move(self.config, self.cursors, self.rows(slots, counts, width), torch.as_tensor(accepted))

    def step(
        self, tokens: Tokens, slots: Sequence[int] = (0,), counts: Sequence[int] | None = None,
        accepted: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """A step and its commit; all tokens of all rows unless said otherwise."""
        counts = [tokens.width] * len(slots) if counts is None else counts
        out = self.update(tokens, slots, counts)
        self.commit(slots, counts, counts if accepted is None else accepted, tokens.width)
        return out

    def run(self, tokens: Tokens, split: Sequence[int], slots: Sequence[int] = (0,)) -> Tensor:
        """All tokens in steps of the sizes in `split`."""
        assert sum(split) == tokens.width
        outputs, start = [], 0
        for size in split:
            outputs.append(self.step(tokens.span(start, start + size), slots))
            start += size
        return torch.cat(outputs, dim=1)

    def fold(self, slot: int) -> Tensor:
        """The state [H, P, N] float32 with all committed records applied."""
        index = torch.tensor([slot])
        if self.conventional is not None:
            return self.conventional.states[slot, self.cursors.origin[slot]]
        if self.shape.kind is SsmKind.MAMBA2:
            return mamba2.mamba2_fold(self.state, self.cursors, index, self.a)[0]
        return gdn.gdn_fold(self.state, self.cursors, index)[0]

    def cursor(self, slot: int) -> tuple[int, int, int]:
        """(origin, h, position)."""
        registers = self.cursors.tensors()[:3]
        return int(registers[0][slot]), int(registers[1][slot]), int(registers[2][slot])

    def places(self, slot: int, start: int, stop: int) -> list[int]:
        """Ring rows of the records start..stop-1, counted from the oldest committed one."""
        origin = int(self.cursors.origin[slot])
        return [(origin + i) % self.config.ring_rows for i in range(start, stop)]

    def poison(self) -> None:
        """NaN in every ring record that is not committed."""
        for slot in range(len(self.cursors.h)):
            dead = self.places(slot, int(self.cursors.h[slot]), self.config.ring_rows)
            for ring in self.state.ring_tensors():
                ring[slot, :, dead] = NAN

    def committed(self, slot: int) -> list[Tensor]:
        """Bytes of the committed records, oldest first, one tensor per ring."""
        places = self.places(slot, 0, int(self.cursors.h[slot]))
        return [as_bytes(ring[slot, :, places]) for ring in self.state.ring_tensors()]

    def checkpoints(self, slot: int) -> list[Tensor]:
        """Bytes of every checkpoint copy and its scales."""
        copies = [self.state.checkpoint, *([self.state.read_copy] if self.state.read_copy else [])]
        return [as_bytes(t[slot]) for copy in copies for t in copy.tensors()]

    def everything(self, slot: int) -> list[Tensor]:
        """Bytes of the slot, dead records and registers included."""
        return [as_bytes(t[slot]) for t in (*self.state.tensors(), *self.cursors.tensors())]


def as_bytes(tensor: Tensor) -> Tensor:
    """A copy as uint8, so that NaN equals itself and zeros of both signs differ."""
    return tensor.contiguous().flatten().clone().view(torch.uint8)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Equal tensor by tensor."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def noise(kind: SsmKind) -> float:
    """Of replay, relative to the largest value: float32 sums, and for GDN the float16 corrections."""
    return RECURRENCE_NOISE if kind is SsmKind.MAMBA2 else CORRECTION_NOISE
