"""The replay window of some rows in chronological order, and output-only evaluation over it.

Every sum runs over the same fixed width C whatever the split of the tokens into calls, one token at a time, as products
and a reduction and never as a matrix product (whose order of summation may change with the number of rows), so that a
token's stored correction has the same bits in any split and any batch. Decay weights are exponentials of sums taken
from the newest record back; records outside the committed range are masked when they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState
from trtllm_replayssm.shapes import SsmShape


@dataclass
class Window:
    """Records of A rows, oldest first. Entries not (yet) used are zero.

    key: [A, G, C, N] float32, normalised where the family normalises; value: [A, H, C, P] float32; decay: [A, H, C]
    log-decay of each token; weight: [A, H, C] factor of the value (dt for Mamba-2, 1 for GDN).
    """

    shape: SsmShape
    key: Tensor
    value: Tensor
    decay: Tensor
    weight: Tensor

    def take(self, rows: Tensor) -> Window:
        """A window of some of the rows, copied."""
        return Window(self.shape, self.key[rows], self.value[rows], self.decay[rows], self.weight[rows])

    def put(self, rows: Tensor, index: Tensor, key: Tensor, decay: Tensor) -> None:
        """Enter a token's key [A', G, N] and log-decay [A', H] at `index` [A'] of the given rows."""
        self.key[rows, :, index] = key
        self.decay[rows, :, index] = decay

    def put_value(self, rows: Tensor, index: Tensor, value: Tensor, weight: Tensor | None = None) -> None:
        """Enter a token's value [A', H, P] and its factor [A', H]; None: the one that is there."""
        self.value[rows, :, index] = value
        if weight is not None:
            self.weight[rows, :, index] = weight

    def decays(self) -> tuple[Tensor, Tensor]:
        """(decay of the checkpoint [A, H], decay of each record [A, H, C]) up to the newest entered token."""
        inclusive = self.decay.flip(-1).cumsum(-1).flip(-1)
        after = torch.cat([inclusive[..., 1:], torch.zeros_like(inclusive[..., :1])], dim=-1)
        return inclusive[..., 0].exp(), after.exp()

    def read_out(self, state: Tensor, vectors: Tensor) -> Tensor:
        """State after the window times vectors: state [A, H, P, N], vectors [A, G, N] -> [A, H, P] (paper, Eq. 6)."""
        checkpoint_decay, record_decay = self.decays()
        dots = _to_heads(self.shape, (self.key * vectors[:, :, None]).sum(-1))
        weights = record_decay * dots * self.weight
        recent = (weights[..., None] * self.value).sum(-2)
        recalled = (state * _to_heads(self.shape, vectors)[:, :, None]).sum(-1)
        return checkpoint_decay[..., None] * recalled + recent

    def fold(self, state: Tensor) -> Tensor:
        """State [A, H, P, N] after the window (paper, Eq. 5), float32."""
        checkpoint_decay, record_decay = self.decays()
        weighted = (record_decay * self.weight)[..., None] * self.value
        keys = _to_heads(self.shape, self.key)
        folded = checkpoint_decay[..., None, None] * state
        for j in range(keys.shape[2]):
            folded += weighted[:, :, j, :, None] * keys[:, :, j, None]
        return folded


def scatter_rows(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """values [A', ...] placed at `rows` of a zero tensor [total, ...]: every sum keeps its shape in every call."""
    out = torch.zeros((total, *values.shape[1:]), device=values.device)
    out[rows] = values
    return out


def _to_heads(shape: SsmShape, grouped: Tensor) -> Tensor:
    """[A, G, ...] -> [A, H, ...], consecutive heads share a group."""
    return grouped.repeat_interleave(shape.heads_per_group, dim=1)


def empty_window(state: ReplayLayerState, rows: int) -> Window:
    """A window of `rows` rows with nothing entered."""
    shape, width = state.shape, state.config.ring_rows
    device = state.ring_key.device
    return Window(
        shape,
        key=torch.zeros((rows, shape.groups, width, shape.state_dim), device=device),
        value=torch.zeros((rows, shape.heads, width, shape.head_dim), device=device),
        decay=torch.zeros((rows, shape.heads, width), device=device),
        weight=torch.zeros((rows, shape.heads, width), device=device),
    )


def ring_index(state: ReplayLayerState, cursors: CursorTensors, slot: Tensor) -> Tensor:
    """Ring rows [A, C] of the slots [A], oldest committed record first."""
    places = torch.arange(state.config.ring_rows, device=slot.device)
    return (cursors.origin[slot].long()[:, None] + places) % state.config.ring_rows


def load_ring(ring: Tensor, slot: Tensor, index: Tensor, committed: Tensor) -> Tensor:
    """Records [A, heads, C, ...] float32 in chronological order; zero outside the `committed` first ones [A]."""
    records = ring[slot[:, None], :, index].transpose(1, 2).float()
    live = torch.arange(index.shape[1], device=slot.device) < committed[:, None]
    live = live[:, None].reshape(live.shape[0], 1, live.shape[1], *[1] * (records.ndim - 3))
    # contiguous: the order of a sum may depend on strides, and those on the number of rows
    return torch.where(live, records, torch.zeros((), device=records.device)).contiguous()
