"""The native operations around the matrix products of a layer, on CUDA tensors of bfloat16 or float16.

Nothing here waits for the device. Every launch is a programmatic one: it may start while its predecessor drains, and
waits for it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops import torch_ops as torch_ops  # registers the operations

Function = _abi.Function
HEAD_PIECE, MAX_HEAD = 8, 256  # of attention heads: channels in whole pieces, up to so many
ROTATION_PIECE = 16  # channels that turn


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of every query and key head: weights [D] float32; unit_offset: they are stored less one."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    unit_offset: bool


@dataclass(frozen=True)
class Rotation:
    """cosine, sine [depth, R] float32 by absolute position; channels (i, i + R) of a head turn together."""

    cosine: Tensor
    sine: Tensor

    @staticmethod
    def table(depth: int, rotary_dim: int, theta: float, device: torch.device) -> Rotation:
        """R = rotary_dim / 2 pairs; angles in float64: exact at long positions."""
        half = rotary_dim // 2
        frequency = theta ** (torch.arange(half, dtype=torch.float64, device=device) * (-2.0 / rotary_dim))
        angle = torch.arange(depth, dtype=torch.float64, device=device)[:, None] * frequency
        return Rotation(angle.cos().float(), angle.sin().float())


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
    """`graph.Graph.rms_norm` with its weight [D] as a float32 vector: x [..., D] -> same."""
    out: Tensor = torch.ops.replayssm.rms_norm(
        flags=_abi.ELEMENTWISE_PROGRAMMATIC_LAUNCH, eps=eps, weight_offset=float(unit_offset), x=x.flatten(0, -2),
        residual=None, weight=weight, sum=None,
    )  # fmt: skip
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, sum: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
    """sum = x + residual, rounded to their type, and its norm; x, residual, sum [..., D], sum contiguous, written."""
    out: Tensor = torch.ops.replayssm.rms_norm(
        flags=_abi.ELEMENTWISE_PROGRAMMATIC_LAUNCH, eps=eps, weight_offset=float(unit_offset), x=x.flatten(0, -2),
        residual=residual.flatten(0, -2), weight=weight, sum=sum.view(-1, sum.shape[-1]),
    )  # fmt: skip
    return out.view(x.shape)


def add_parts_rms_norm(
    parts: Tensor, residual: Tensor, sum: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
) -> Tensor:
    """The same of the sum of parts [P, ..., D] float32, which are added up first."""
    out: Tensor = torch.ops.replayssm.parts_rms_norm(
        flags=_abi.ELEMENTWISE_PROGRAMMATIC_LAUNCH, eps=eps, weight_offset=float(unit_offset), x=parts.flatten(1, -2),
        residual=residual.flatten(0, -2), weight=weight, sum=sum.view(-1, sum.shape[-1]),
    )  # fmt: skip
    return out.view(residual.shape)


def activation(
    function: Function, x: Tensor, factor: Tensor | None = None, opening: Tensor | None = None
) -> Tensor:  # fmt: skip
    """function(x), times factor [..., C] and sigmoid(opening [...]) where there are any: x [..., C], or heads
    [B, T, G, C / G] -> [..., C]. opening: float32. All may be slices of wider tensors.
    """
    rows = x.flatten(0, 1) if x.dim() == 4 else x.flatten(0, -2)[:, None]
    out: Tensor = torch.ops.replayssm.activation(
        flags=_abi.ELEMENTWISE_PROGRAMMATIC_LAUNCH, function=int(function), x=rows,
        factor=None if factor is None else factor.flatten(0, -2).unflatten(-1, rows.shape[1:]),
        opening=None if opening is None else opening.flatten(),
    )  # fmt: skip
    return out.view(*x.shape[:2], -1) if x.dim() == 4 else out.view(x.shape)


def attention_inputs(
    rows: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, caches: dict[str, Tensor], *,
    norms: HeadNorms | None, rotation: Rotation | None,
) -> Tensor:  # fmt: skip
    """Norms and rotation of q [B, T, Hq, D] and k [B, T, Hkv, D]; k and v written into the caches -> q.

    rows: slot, start, num_tokens [B] int32; caches: keys, values [S, Hkv, depth, D]. Entries of the result for tokens
    that do not exist are left as they are.
    """
    out: Tensor = torch.ops.replayssm.attention_inputs(
        flags=_abi.ATTENTION_PROGRAMMATIC_LAUNCH, eps=0.0 if norms is None else norms.eps,
        weight_offset=0.0 if norms is None else float(norms.unit_offset), **rows, q=q, k=k, v=v,
        q_weight=None if norms is None else norms.q_weight, k_weight=None if norms is None else norms.k_weight,
        cosine=None if rotation is None else rotation.cosine, sine=None if rotation is None else rotation.sine,
        **caches,
    )  # fmt: skip
    return out


def attention(rows: dict[str, Tensor], q: Tensor, caches: dict[str, Tensor]) -> Tensor:
    """Causal attention of q [B, T, Hq, D] over the caches -> [B, T, Hq, D], zeros for tokens that do not exist."""
    out: Tensor = torch.ops.replayssm.attention(
        flags=_abi.ATTENTION_PROGRAMMATIC_LAUNCH, scale=q.shape[-1] ** -0.5, **rows, q=q, **caches
    )
    return out
