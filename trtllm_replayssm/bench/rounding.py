"""How far a right result may be from the float64 value: the one rule of the benchmark's gate and of the kernel tests.

A kernel evaluates a formula in float32 and rounds once. Its result is therefore off by at most half a step of its type,
taken at the value, and by what float32 loses of the formula:

    |result - exact| <= half a step at (|exact| + noise) + noise,    noise = 2 * lost * magnitude

`magnitude` is, element by element, the sum of the magnitudes of the formula's terms: errors of a sum in any order are
relative to it, not to the sum, whose terms may cancel. `lost` is the largest error in these units that the same formula
makes in plain float32 torch on the same data, at least one step of the operands that a kernel is allowed: a lucky order
of one sum is no measure. Half a step alone is too little where the exact value lies beside a tie: an error of any size
may then decide which neighbour is taken.

`rounded` comes on top where the formula rounds a number on its way and the float64 value does not.

Float32 states: twice what plain float32 loses, relative to a head's largest value, and one step of float32 of it.

Accepts another order of the same float32 sums. Rejects the neighbour of the right value, but for the share of elements
(lost * magnitude over half a step, some in a thousand) that lie beside a tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.bench.bounds import FACTOR, FLOAT32_STEP
from trtllm_replayssm.dtypes import StateFormat

# Operands of a product: float32 in two TF32 parts, at least, where a step's outputs come from; in prompts, two bfloat16
# parts, the second one rounded.
STEP_OPERANDS = 2.0**-22
PROMPT_OPERANDS = 2.0**-18
STATE_OPERANDS = 2.0**-21  # two such steps: of the state and of what is added to it
_TINY = 1e-300  # keeps 0 / 0 out: where no term is, neither is an error


@dataclass(frozen=True, slots=True)
class FloatType:
    """bits: of the significand, the leading one included; least: exponent of the smallest normal number."""

    bits: int
    least: int


BFLOAT16, FLOAT16 = FloatType(8, -126), FloatType(11, -14)
TYPES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
ELEMENTS = {StateFormat.FLOAT16: FLOAT16, StateFormat.FP8: FloatType(4, -6), StateFormat.NVFP4: FloatType(2, 0)}


def step(value: Tensor, kind: FloatType) -> Tensor:
    """Distance of neighbours of `kind` in the binade of each |value|, float64; of zero the smallest."""
    wide = value.abs().double()
    exponent = torch.frexp(wide).exponent - 1
    exponent = torch.where(wide == 0, kind.least, exponent).clamp(min=kind.least)
    return torch.exp2((exponent - (kind.bits - 1)).double())


def lost(plain: Tensor, exact: Tensor, magnitude: Tensor) -> float:
    """Largest error of `plain`, made in float32, in units of `magnitude`."""
    return float(((plain.double() - exact).abs() / magnitude.clamp(min=_TINY)).amax())


def output_bound(
    exact: Tensor, magnitude: Tensor, kind: FloatType, share: float, rounded: Tensor | float = 0.0
) -> Tensor:
    """Largest error of an output of type `kind`; share: what float32 loses, in units of `magnitude`."""
    noise = FACTOR * share * magnitude + rounded
    return 0.5 * step(exact.abs() + noise, kind) + noise


def state_bound(share: float) -> float:
    """Largest error of a float32 state over the head's largest value; share: what plain float32 loses of it."""
    return FACTOR * max(share, STATE_OPERANDS) + FLOAT32_STEP


def stored_bound(exact: Tensor, scale: Tensor, kind: FloatType, noise: Tensor, *, nearest: bool) -> Tensor:
    """Largest error of a stored state: a step of its format at the value, half of it for rounding to nearest.

    scale: that multiplies the codes, noise: of the float32 state before rounding; both broadcast to `exact`.
    """
    steps = step((exact.abs() + noise) / scale, kind) * scale
    return (0.5 if nearest else 1.0) * steps + noise


def excess(got: Tensor, exact: Tensor, bound: Tensor) -> float:
    """Largest error over its bound: at most 1 where all is right. Infinite for NaN."""
    share = float(((got.double() - exact).abs() / bound).amax()) if exact.numel() else 0.0
    return share if share == share else float("inf")
