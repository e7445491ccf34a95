"""Prompt chunks of a pool by the CUDA kernels: the scan of one layer for all rows of a chunk in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.ops import _abi, torch_ops
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.native import layer_numbers, registers, state_tensors
from trtllm_replayssm.shapes import SsmKind

_EXAMPLE_TOKENS = 64


class NativePrefill:
    """Scans of one pool. Workspaces are taken from torch for each call: prompts have any length."""

    def __init__(self, library: _abi.Library) -> None:
        """library: the one that the custom operations call."""
        self._library = library

    def unsupported(self, state: ReplayLayerState, cursors: CursorTensors) -> str | None:
        """Why the library cannot scan prompts for a layer's pool, in its own words, or None."""
        shape, act, device = state.shape, state.ring_key.dtype, state.ring_key.device
        lead = (1, _EXAMPLE_TOKENS)
        values = torch.empty((*lead, shape.heads, shape.head_dim), dtype=act, device=device)
        keys = torch.empty((*lead, shape.groups, shape.state_dim), dtype=act, device=device)
        scalars, vector = torch.empty((*lead, shape.heads), device=device), torch.empty(shape.heads, device=device)
        gdn = shape.kind is SsmKind.GDN
        inputs = {"log_decay": scalars, "beta": scalars} if gdn else {"dt": scalars, "a": vector, "skip": vector}
        padding = torch.full((1,), -1, dtype=torch.int32, device=device)
        rows = {"slot": padding, "num_tokens": padding, "row_flags": padding.clamp(min=0), "carry_index": padding}
        tensors = {"value": values, "k": keys, "q": keys, "out": values, **inputs}
        carry = {"carry": torch.empty((1, shape.heads, shape.head_dim, shape.state_dim), device=device)}
        try:
            self._workspace({**rows, **registers(cursors), **tensors, **state_tensors(state), **carry}, state)
        except ReplaySSMError as error:
            return str(error)
        return None

    def scan(
        self, state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, tokens: dict[str, Tensor],
        row_flags: Tensor, carry: Tensor | None, carry_index: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """One chunk of each row: tokens by the names of prefill.h, row_flags [B] int32 of `_abi.PrefillFlag`.

        carry [K, H, P, N] float32: entry carry_index[i], [B] int32, is row i's state before the chunk (FROM_CARRY), and
        after it (TO_CARRY). Returns [B, T, H, P] in the type of the values. Cursors stay.
        """
        context = {"slot": rows.slot_int32, "num_tokens": rows.num_tokens_int32, "row_flags": row_flags}
        absent = {name.rstrip("?"): None for name in torch_ops.PREFILL.inputs if name.endswith("?")}
        named: dict[str, Tensor | None] = {
            **absent, **context, "carry_index": carry_index, **registers(cursors), **tokens, **state_tensors(state),
            "carry": carry,
        }  # fmt: skip
        size = self._workspace({**named, "out": tokens["value"]}, state)
        workspace = torch.empty(size, dtype=torch.uint8, device=row_flags.device)
        out: Tensor = torch.ops.replayssm.prefill(**layer_numbers(state), flags=0, **named, workspace=workspace)
        return out

    def _workspace(self, tensors: dict[str, Tensor | None], state: ReplayLayerState) -> int:
        return self._library.prefill_workspace(torch_ops.fill(_abi.PrefillArgs, tensors, **layer_numbers(state)))
