"""The sum of rows over the ranks that share a model, by the CUDA kernel that pushes them into each other's inboxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops import torch_ops as torch_ops  # registers the operations

PIECE, MAX_CHANNELS = 8, 8192  # channels of a row: in whole pieces, up to so many
MAX_RANKS = _abi.MAX_RANKS
MARK = -0.0  # what every element of an inbox is at first


@dataclass(frozen=True)
class Inboxes:
    """The inboxes of all ranks, as one of them maps them.

    own [2, ranks, rows, D] bfloat16 | float16, filled with MARK: this rank's. addresses: of all ranks' inboxes, here.
    turn [rows] int32, zeros. gave_up [1] int32 in pinned host memory, zero; another number: nobody waits any more.
    patience: seconds that a rank is waited for. mapping: whatever keeps the others' memory mapped. began: called with
    each launch.

    HAZARD: every rank makes the same calls in the same order, each on one stream; none before all inboxes are filled.
    """

    rank: int
    own: Tensor
    addresses: tuple[int, ...]
    turn: Tensor
    gave_up: Tensor
    patience: float
    mapping: object = None
    began: Callable[[], None] = lambda: None

    @staticmethod
    def can_serve(ranks: int, channels: int, dtype: torch.dtype) -> bool:
        """Whether the kernel adds up rows of so many channels over so many ranks."""
        whole = channels % PIECE == 0 and channels <= MAX_CHANNELS
        return whole and 2 <= ranks <= MAX_RANKS and dtype in (torch.bfloat16, torch.float16)

    def serves(self, x: Tensor) -> bool:
        """Whether x [..., D] has room in the inboxes, and their type."""
        rows, channels = self.own.shape[2:]
        return x.is_cuda and x.dtype is self.own.dtype and x.shape[-1] == channels and x.numel() <= rows * channels

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [..., D], rounded once."""
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(x, None, None, total, None, 0.0, unit_offset=False)
        return total

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, total: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> Tensor:
        """total = every rank's x and residual, rounded once to their type, and its norm; x, residual, total [..., D],
        total contiguous, written; weight [D] float32.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(x, residual, weight, total, out, eps, unit_offset=unit_offset)
        return out

    def _launch(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, total: Tensor, out: Tensor | None, eps: float,
        *, unit_offset: bool,
    ) -> None:  # fmt: skip
        if not self.serves(x):
            raise ContractError(
                "sum_ranks", "x", expected=f"[..., D] that {list(self.own.shape)} {self.own.dtype} has room for",
                got=f"{list(x.shape)} {x.dtype}",
            )  # fmt: skip
        self.began()
        torch.ops.replayssm.sum_ranks(
            flags=_abi.SUM_RANKS_PROGRAMMATIC_LAUNCH, eps=eps, weight_offset=float(unit_offset), rank=self.rank,
            capacity=self.own.shape[2], patience_ns=int(self.patience * 1e9), inbox=list(self.addresses),
            gave_up=self.gave_up.data_ptr(), x=x.flatten(0, -2),
            residual=None if residual is None else residual.flatten(0, -2), weight=weight, turn=self.turn,
            sum=total.view(-1, total.shape[-1]), out=None if out is None else out.view(-1, out.shape[-1]),
        )  # fmt: skip
