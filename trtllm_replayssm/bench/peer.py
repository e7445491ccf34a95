"""What an adapter to a kernel of another project is: which cases it serves, its launch choices, how a step is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.shapes import SsmKind

Batches = Sequence[Tensor]
"""Slots [B] int32 of the batches that launches take turns over, all different; 0, some packages' padding, is none."""
Step = Callable[[int, int], None]
"""Enqueues one step over the batch of that number, each slot with h committed records; a conventional one ignores h."""


def any_variant(_variant: Any) -> AbstractContextManager[None]:
    """For kernels whose launch choice is an argument."""
    return nullcontext()


def one_token(tokens: int) -> bool:
    """Which steps a kernel of plain decoding takes."""
    return tokens == 1


def many_tokens(tokens: int) -> bool:
    """Which steps a kernel of verification takes."""
    return tokens > 1


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of a package.

    package: the installed distribution. tokens: whether it serves steps of that many. variants: launch choices to try;
    the fastest counts. make: a step for a case, its batches and a variant. chosen: within it the package takes that
    variant, where it is a setting of the package.
    """

    name: str
    package: str
    kind: SsmKind
    operation: Operation
    tokens: Callable[[int], bool]
    variants: tuple[Any, ...]
    make: Callable[[KernelCase, Batches, Any], Step]
    chosen: Callable[[Any], AbstractContextManager[None]] = any_variant

    def serves(self, case: KernelCase) -> bool:
        """Whether the case is the kernel's: float32 states, and one copy of them."""
        fits = case.operation is self.operation and case.shape.kind is self.kind and self.tokens(case.tokens)
        return fits and case.recurrence.value == "float32" and case.read is None


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values on the device, activations unless another type is asked for."""
    return torch.randn(size, device="cuda").to(dtype)


def slots_of(batches: Batches) -> int:
    """How many slots a pool must have."""
    return 1 + sum(len(slots) for slots in batches)


def states_of(case: KernelCase, slots: int) -> Tensor:
    """[slots, H, P, N] float32."""
    shape = case.shape
    return torch.rand((slots, shape.heads, shape.head_dim, shape.state_dim), device="cuda") - 0.5


def same_everywhere(value: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """A cursor that all rows or slots share."""
    return torch.full((count,), value, dtype=dtype, device="cuda")


@dataclass(frozen=True, slots=True)
class MambaInputs:
    """Inputs of B rows of T tokens, one after another, in the layout of `selective_state_update`.

    x [B*T, H, P], dt [B*T, H, P] (one value a head), a [H, P, N] (likewise), b and c [B*T, G, N], skip and dt_bias
    [H, P], out [B*T, H, P].
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor
    dt_bias: Tensor
    out: Tensor


def mamba_inputs(case: KernelCase) -> MambaInputs:
    """Random inputs; decays in the range of trained models."""
    shape, tokens = case.shape, case.rows * case.tokens
    wide = (shape.heads, shape.head_dim)
    return MambaInputs(
        x=random(tokens, *wide),
        dt=random(tokens, shape.heads)[:, :, None].expand(tokens, *wide),
        a=(-torch.rand(shape.heads, device="cuda") * 15 - 1)[:, None, None].expand(*wide, shape.state_dim),
        b=random(tokens, shape.groups, shape.state_dim),
        c=random(tokens, shape.groups, shape.state_dim),
        skip=random(shape.heads)[:, None].expand(wide),
        dt_bias=(random(shape.heads) - 4)[:, None].expand(wide),
        out=random(tokens, *wide),
    )


@dataclass(frozen=True, slots=True)
class GdnInputs:
    """Inputs of B rows of T tokens, one after another, as Qwen3.5's layer hands them to its kernel.

    mixed [B*T, 2 G N + H P] queries, keys and values; decay and beta [B*T, H]; a_log and dt_bias [H] float32;
    out [B*T, H, P].
    """

    mixed: Tensor
    decay: Tensor
    beta: Tensor
    a_log: Tensor
    dt_bias: Tensor
    out: Tensor


def gdn_inputs(case: KernelCase) -> GdnInputs:
    """Random inputs; decays in the range of trained models."""
    shape, tokens = case.shape, case.rows * case.tokens
    return GdnInputs(
        mixed=random(tokens, 2 * shape.groups * shape.state_dim + shape.heads * shape.head_dim),
        decay=random(tokens, shape.heads),
        beta=random(tokens, shape.heads),
        a_log=torch.rand(shape.heads, device="cuda") * 2,
        dt_bias=torch.randn(shape.heads, device="cuda") * 0.5 - 3,
        out=random(tokens, shape.heads, shape.head_dim),
    )
