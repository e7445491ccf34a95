"""The drafting head of a session: hidden states of the newly committed tokens, kept by slot, and drafts from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.session.capture import GraphPool
from trtllm_replayssm.runtime.session.graph_sizes import RecordedSizes
from trtllm_replayssm.runtime.session.logits_buffer import LogitsBuffer
from trtllm_replayssm.runtime.session.padded_rows import passes
from trtllm_replayssm.runtime.session.static_step import Drafted, StaticStep, StepModel, draft


@dataclass(frozen=True)
class Known:
    """Hidden states of the tokens a slot's last step committed: `count` of them from absolute position `start`.

    chunk [n, hidden]: of a prompt chunk or a snapshot. None: they are the slot's entry of the head's store.
    """

    start: int
    count: int
    chunk: Tensor | None


class _Drafting:
    """Rows between `begin` and `next`; all tensors stay where they are.

    ids [B, T] int64, slot, num_tokens [B] int32, start [B] int64, hidden [B, 1, hidden] activation type.
    first() drafts from the store, following() from `hidden` and ids[:, 0]; both advance start and set hidden.
    """

    def __init__(
        self, model: StepModel, store: Tensor, batch: int, width: int, keep: Callable[[Tensor], Tensor]
    ) -> None:
        device = store.device
        self.ids = torch.zeros((batch, width), dtype=torch.int64, device=device)
        self.slot = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.start = torch.zeros(batch, dtype=torch.int64, device=device)
        self.hidden = torch.zeros((batch, 1, store.shape[-1]), dtype=store.dtype, device=device)
        self._model, self._store, self._keep = model, store, keep
        self.first, self.following = self._first, self._following

    def record(self, graphs: GraphPool) -> None:
        """Replay from now on."""
        self.first, self.following = graphs.captured(self._first), graphs.captured(self._following)

    def _first(self) -> Tensor:
        hidden = self._store[self.slot.clamp(min=0), : self.ids.shape[1]]
        return self._take(draft(self._model, StepRows(self.slot, self.num_tokens), self.start, self.ids, hidden))

    def _following(self) -> Tensor:
        self.num_tokens.fill_(1)
        rows = StepRows(self.slot, self.num_tokens)
        return self._take(draft(self._model, rows, self.start, self.ids[:, :1], self.hidden))

    def _take(self, drafted: Drafted) -> Tensor:
        self.hidden.copy_(drafted.hidden)
        self.start.add_(self.num_tokens)
        return self._keep(drafted.logits)


class MtpHead:
    """Drafts of one session. Of a model without a head it keeps nothing."""

    def __init__(self, model: StepModel, graphs: GraphPool, sizes: RecordedSizes, logits: LogitsBuffer) -> None:
        pools = model.pools
        self._model, self._graphs, self._sizes, self._logits = model, graphs, sizes, logits
        self._present = bool(pools.geometry.mtp_pattern)
        self._width = pools.replay.max_step_tokens
        shape = (pools.pool.slots + 1 if self._present else 0, self._width, pools.geometry.hidden)
        # one more entry than slots: where padding rows write
        self._store = torch.zeros(
            shape, dtype=torch_dtype(pools.pool.activation), device=pools.cursors.position.device
        )
        self._known: dict[int, Known] = {}
        self._recorded: dict[int, _Drafting] = {}
        self._drafting: tuple[_Drafting, list[int]] | None = None

    @property
    def present(self) -> bool:
        """Whether the model has a drafting head."""
        return self._present

    @property
    def drafting(self) -> list[int]:
        """Slots of the rows of the last `begin`, none when it means nothing any more."""
        return [] if self._drafting is None else self._drafting[1]

    def remember(self, step: StaticStep, hidden: Tensor) -> None:
        """Keep a step's hidden states [B, T, hidden]; recorded with it. `commit` says how many of them count."""
        if not self._present:
            return
        exists = (step.slot >= 0) & (step.num_tokens > 0)
        place = torch.where(exists, step.slot, len(self._store) - 1).long()
        self._store[:, : step.width].index_copy_(0, place, hidden)

    def commit(self, slot: int, start: int, count: int) -> None:
        """The slot's last step began at `start` and committed `count` tokens."""
        if self._present:
            self._known[slot] = Known(start, count, None)

    def keep_chunk(self, slot: int, start: int, states: Tensor) -> None:
        """A prompt chunk's hidden states [n, hidden], or the last one of a snapshot. They are copied: a slot may keep
        them until it is given back, and those of all rows of the pass with them.
        """
        if self._present:
            self._known[slot] = Known(start, len(states), states.clone())

    def known(self, slot: int) -> int | None:
        """Tokens whose hidden states are known: how many `begin` must be given. None: nothing is known."""
        return self._known[slot].count if slot in self._known else None

    def last(self, slot: int, position: int) -> Tensor | None:
        """[1, hidden] of the last of a slot's `position` committed tokens, None when it is not known: after steps that
        this head has not seen it knows earlier ones only.
        """
        known = self._known.get(slot)
        here = known is not None and known.count > 0 and known.start + known.count == position
        return self._states(slot)[-1:] if here else None

    def copy(self, source: int, target: int) -> None:
        """The slot `target` is a copy of `source`."""
        known = self._known.get(source)
        if known is not None:
            self._known[target] = Known(known.start, known.count, self._states(source).clone())

    def forget(self, slot: int) -> None:
        """The slot is given back."""
        self._known.pop(slot, None)
        self._drafting = None

    def warm_up(self) -> None:
        """Record every batch size, the largest first."""
        for batch in reversed(self._sizes.sizes if self._present else ()):
            self._find(batch)

    def begin(self, ids: Tensor, rows: StepRows) -> Tensor:
        """Pairs of each row, ids [n, w] int64 and rows on the host, as many as `known` says -> logits [n, V]."""
        slots = rows.slot.tolist()
        needed = self._model.network.rows_for(slots)
        drafting = self._find(needed)
        self._drafting = drafting, slots
        start = torch.tensor([self._known[slot].start for slot in slots])
        if ids.shape[1] <= self._width and all(self._known[slot].chunk is None for slot in slots):
            self._fill(drafting, ids, rows, start)
            return drafting.first()[: len(slots)]
        self._fill(drafting, ids[:, :1], rows, start + rows.num_tokens)
        logits: dict[int, Tensor] = {}
        for part in passes(rows.num_tokens.tolist()):
            chosen = StepRows(rows.slot[part], rows.num_tokens[part])
            drafted = self._draft(ids[part, : max(int(chosen.num_tokens.max()), 1)], chosen, start[part])
            drafting.hidden[part] = drafted.hidden[: len(part)]
            logits.update(zip(part, drafted.logits[: len(part)], strict=True))
        return torch.stack([logits[i] for i in range(len(slots))])

    def _draft(self, ids: Tensor, rows: StepRows, start: Tensor) -> Drafted:
        """First drafts of rows on the host, not recorded, with rows of padding behind them."""
        slots, device = rows.slot.tolist(), self._store.device
        needed = self._model.network.rows_for(slots)
        hidden = torch.zeros((needed, ids.shape[1], self._store.shape[-1]), dtype=self._store.dtype, device=device)
        for i, slot in enumerate(slots):
            hidden[i, : self._known[slot].count] = self._states(slot)
        more = (0, needed - len(slots))
        moved = StepRows(pad(rows.slot, more, value=-1).to(device), pad(rows.num_tokens, more).to(device))
        return draft(self._model, moved, pad(start, more).to(device), pad(ids, (0, 0, *more)).to(device), hidden)

    def next(self, tokens: Tensor) -> Tensor:
        """Each row's drafted token [n] int64, on the host -> logits [n, V]."""
        assert self._drafting is not None, "`begin` comes first"
        drafting, slots = self._drafting
        drafting.ids[: len(slots), 0].copy_(tokens)
        return drafting.following()[: len(slots)]

    def _states(self, slot: int) -> Tensor:
        known = self._known[slot]
        return self._store[slot, : known.count] if known.chunk is None else known.chunk

    def _fill(self, drafting: _Drafting, ids: Tensor, rows: StepRows, start: Tensor) -> None:
        count, width = ids.shape
        drafting.ids.zero_()[:count, :width].copy_(ids)
        drafting.slot.fill_(-1)[:count].copy_(rows.slot)
        drafting.num_tokens.zero_()[:count].copy_(rows.num_tokens)
        drafting.start.zero_()[:count].copy_(start)

    def _find(self, rows: int) -> _Drafting:
        size = self._sizes.place(rows)
        if size is None:
            return _Drafting(self._model, self._store, rows, self._width, lambda logits: logits)
        if size not in self._recorded:
            drafting = _Drafting(self._model, self._store, size, self._width, self._logits.keep)
            drafting.record(self._graphs)
            self._recorded[size] = drafting
        return self._recorded[size]
