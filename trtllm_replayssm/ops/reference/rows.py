"""Checks of a step's rows, once, at the boundary of the reference operations."""

from __future__ import annotations

from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops.layer_state import StepRows


def step_rows(operation: str, slot: Tensor, num_tokens: Tensor, slots: int, width: int) -> StepRows:
    """Check slot [B] (-1 or 0..S-1, no slot twice) and num_tokens [B] (0..width); any integer type, any stride."""
    slot, num_tokens = slot.long(), num_tokens.long()
    if slot.ndim != 1 or slot.shape != num_tokens.shape:
        raise ContractError(
            operation, "slot, num_tokens", expected="two vectors [B]", got=(tuple(slot.shape), tuple(num_tokens.shape))
        )
    if bool(((slot < -1) | (slot >= slots)).any()):
        raise ContractError(operation, "slot", expected=f"-1 (padding) or 0..{slots - 1}", got=slot.tolist())
    if bool(((num_tokens < 0) | (num_tokens > width)).any()):
        raise ContractError(operation, "num_tokens", expected=f"0..{width}", got=num_tokens.tolist())
    used = slot[slot >= 0]
    if used.unique().numel() != used.numel():
        raise ContractError(operation, "slot", expected="each slot at most once", got=slot.tolist())
    return StepRows(slot, num_tokens)


def check_width(operation: str, config: ReplayConfig, width: int) -> None:
    """A decode step holds at most T_max tokens a row."""
    if width > config.max_step_tokens:
        raise ContractError(
            operation, "T", expected=f"at most T_max = {config.max_step_tokens}", got=width,
            hint="Make the pool with a larger max_step_tokens",
        )  # fmt: skip
