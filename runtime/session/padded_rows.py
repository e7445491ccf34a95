"""Rows of different lengths as one padded batch on the host, checked, and which of them run together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.runtime.session.integers import integers


def padded_rows(
    operation: str, rows: Sequence[tuple[int, Sequence[int]]], *, vocab: int, slots: int
) -> tuple[Tensor, StepRows]:
    """(slot, tokens) of each row -> ids [B, T] int64 and the rows; tokens of padding rows (slot -1) are not read.

    Raises ContractError for ids outside the vocabulary, unknown slots and slots that come twice.
    """
    tokens = [t if s >= 0 else () for s, t in rows]
    ids = torch.zeros((len(rows), max([1, *(len(t) for t in tokens)])), dtype=torch.int64)
    for i, row in enumerate(tokens):
        checked = integers(operation, "tokens", row, 0, vocab - 1)
        ids[i, : len(row)] = torch.tensor(checked, dtype=torch.int64)
    slot = torch.tensor([s for s, _ in rows], dtype=torch.int64)
    counts = torch.tensor([len(t) for t in tokens])
    return ids, step_rows(operation, slot, counts, slots, ids.shape[1])


def passes(counts: Sequence[int], gains: Sequence[int] = ()) -> list[list[int]]:
    """Tokens of each row -> the rows of each pass, by index. Padded to the longest of its rows, a pass has no more
    positions than all rows have tokens: one long prompt among short ones would else be computed for each of them. Rows
    of one length are one pass; there are about log2 of the longest passes at most.

    gains: by how many sets of states a row will have more than it had. Passes that give up more come first, so that
    between two of them there are never more than before the first or behind the last.
    """
    total, found = sum(counts), list[list[int]]()
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        if found and (len(found[-1]) + 1) * counts[found[-1][0]] <= total:
            found[-1].append(row)
        else:
            found.append([row])
    return sorted([sorted(rows) for rows in found], key=lambda rows: sum(gains[row] for row in rows) if gains else 0)
