"""What the engine asks of a session: one interface for the torch session and the TensorRT session.

A session owns the model and the pools of one replica and runs steps over slots; it knows nothing of requests.
Token ids are ints; logits come back as float32 numpy arrays. Protocol of one decode step:

    logits = session.decode(rows)          # appends records, may flush, moves no cursor
    session.commit(accepted)               # moves the cursors of exactly those rows, in the same order
    session.mtp_begin / session.mtp_next   # optional drafting for the next step, from the hidden states just computed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.shapes import ModelGeometry

Logits = NDArray[np.float32]
RawArray = tuple[str, tuple[int, ...], bytes]
"""A tensor as bytes: torch's name of its type ("float32", "bfloat16", "float8_e4m3fn", ...), shape, elements."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one slot; `last` says that the prompt ends here (its logits are wanted)."""

    slot: int
    tokens: Sequence[int]
    last: bool


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One row of a decode or verify step: the base token and its drafts, 1..T_max tokens. slot -1 is padding."""

    slot: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class MtpRow:
    """Pairs for the multi-token-prediction head: the tokens that follow the slot's newly committed positions.

    next_tokens[i] is the token at (position of the i-th token committed by the slot's last step) + 1; its length is
    the number of tokens that step committed (the chunk length for a prompt chunk).
    """

    slot: int
    next_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class SlotCursors:
    """A slot's device cursors, read back: see `spec.cursors.Cursors`."""

    origin: int
    h: int
    position: int
    seed: int


class SlotSnapshot(Protocol):
    """What a slot remembers, in host memory; valid for any slot of a pool of the same shape. Never changes."""

    @property
    def position(self) -> int:
        """Committed tokens that the snapshot has absorbed."""
        ...

    @property
    def first(self) -> int:
        """First position whose keys and values it holds; those before it are in earlier snapshots."""
        ...

    @property
    def nbytes(self) -> int:
        """Host memory it occupies."""
        ...

    def kv_only(self) -> SlotSnapshot:
        """Its keys and values without its state: it can stand before a later snapshot, but not be restored itself."""
        ...

    def arrays(self) -> dict[str, RawArray]:
        """All of it by name, for a file; `Session.load_snapshot` takes it back."""
        ...


class Session(Protocol):
    """One replica: the model, its state pools and KV slots."""

    geometry: ModelGeometry
    replay: ReplayConfig
    pool: PoolConfig

    @property
    def signature(self) -> str:
        """Model, formats and shapes in words: snapshots go to sessions of an equal signature only."""
        ...

    def warm_up(self) -> None:
        """Make now what a step would otherwise make when it first comes. No step may await its commit."""
        ...

    def allocate(self, seed: int) -> int:
        """A free slot with all its registers reset and keyed by `seed` (64 bits). Raises CapacityError when full."""
        ...

    def free(self, slot: int) -> None:
        """Give a slot back."""
        ...

    @property
    def free_slots(self) -> int:
        """Slots that `allocate` can still hand out."""
        ...

    def fork(self, slot: int, seed: int) -> int:
        """A new slot with a copy of another's state and its own seed. Raises CapacityError when full."""
        ...

    def save(self, slot: int, since: int = 0) -> SlotSnapshot:
        """Copy a slot's state to host memory: checkpoints and ring, or the float32 carry of an unfinished prompt;
        windows, cursors, seed; keys and values from position `since` on."""
        ...

    def restore(
        self, snapshot: SlotSnapshot, *, seed: int | None = None, before: Sequence[SlotSnapshot] = ()
    ) -> int:
        """A new slot that continues where the snapshot was taken. Raises CapacityError when full.

        seed: keys the slot from now on, None: the snapshot's own. before: the snapshots with the keys and values of
        positions 0..snapshot.first, in order; where two overlap, the later one counts. `mtp_begin` may follow with
        one token, the one after the snapshot's last position.
        """
        ...

    def load_snapshot(self, position: int, arrays: Mapping[str, RawArray], *, prompt_done: bool) -> SlotSnapshot:
        """A whole snapshot from its `arrays`. Raises ContractError, naming the first that does not fit.

        prompt_done: the slot will decode, so that the snapshot must not be from between two chunks of a prompt.
        """
        ...

    def cursors(self, slot: int) -> SlotCursors:
        """The slot's cursors."""
        ...

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Logits | None]:
        """Run prompt chunks (one per slot) -> logits [V] of the last token for chunks marked last, None otherwise."""
        ...

    def decode(self, rows: Sequence[DecodeRow]) -> list[Logits]:
        """Run one step -> logits [n, V] per row (n = its tokens; [0, V] for padding). `commit` must follow."""
        ...

    def commit(self, accepted: Sequence[int]) -> None:
        """Commit the first `accepted[i]` tokens (clamped to 0..n) of row i of the last `decode`."""
        ...

    def mtp_begin(self, rows: Sequence[MtpRow]) -> list[Logits]:
        """Run the MTP head over newly committed positions -> logits [V] of each row's first draft."""
        ...

    def mtp_next(self, tokens: Sequence[int]) -> list[Logits]:
        """Feed each row's drafted token -> logits [V] of its next draft. Rows as in the last `mtp_begin`."""
        ...

    def check_integrity(self) -> None:
        """Raise InvariantError when the pools' bookkeeping is inconsistent."""
        ...

    def close(self) -> None:
        """End what runs outside this process for the session. Nothing may be called after it but `close`."""
        ...
