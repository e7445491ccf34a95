"""Shapes of small SSM layers."""

from __future__ import annotations

from trtllm_replayssm.shapes import SsmKind, SsmShape


def ssm_shape(kind: SsmKind, heads: int = 4, groups: int = 2, head_dim: int = 16, state_dim: int = 32) -> SsmShape:
    return SsmShape(
        kind=kind, heads=heads, groups=groups, head_dim=head_dim, state_dim=state_dim, conv_kernel=4, conv_bias=True
    )
