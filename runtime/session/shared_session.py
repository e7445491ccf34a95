"""The first rank's session for a replica over several devices: every call runs on all ranks alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from trtllm_replayssm.config import RANK_TIMEOUT, PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError, InvariantError
from trtllm_replayssm.runtime.session.base import (
    DecodeRow,
    Logits,
    MtpRow,
    PrefillChunk,
    RawArray,
    Session,
    SlotCursors,
    SlotSnapshot,
)
from trtllm_replayssm.runtime.session.rank_marks import RankMarks
from trtllm_replayssm.runtime.session.rank_parts import MAKE, Maker, RankParts
from trtllm_replayssm.runtime.session.rank_watch import ENDED, PATIENCE, RankWatch
from trtllm_replayssm.shapes import ModelGeometry


@dataclass(frozen=True)
class SharedSnapshot:
    """One rank's part after another; all are of the same positions."""

    parts: tuple[SlotSnapshot, ...]

    @property
    def position(self) -> int:
        """See `SlotSnapshot.position`."""
        return self.parts[0].position

    @property
    def first(self) -> int:
        """See `SlotSnapshot.first`."""
        return self.parts[0].first

    @property
    def nbytes(self) -> int:
        """Host memory of all parts."""
        return sum(part.nbytes for part in self.parts)

    def kv_only(self) -> SharedSnapshot:
        """See `SlotSnapshot.kv_only`."""
        return SharedSnapshot(tuple(part.kv_only() for part in self.parts))

    def arrays(self) -> dict[str, RawArray]:
        """Every part's tensors, their names after the rank."""
        return {f"{rank}/{name}": a for rank, part in enumerate(self.parts) for name, a in part.arrays().items()}


class SharedSession:
    """Implements `Session`. The other ranks run what they are told through `workers`; an answer of theirs is awaited
    after each call, so that a rank that fails is noticed. An error that all ranks raise alike is raised here.
    """

    def __init__(
        self, own: Session, workers: Sequence[Connection], geometry: ModelGeometry, hang_up: Callable[[], None],
        give_up: Callable[[], None], *, patience: float = PATIENCE, marks: RankMarks | None = None,
        limit: float = RANK_TIMEOUT, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """geometry: of the whole model. workers: one connection per further rank, see `rank_process.serve`; hang_up:
        ends them. give_up, patience, marks, limit: as `RankWatch`, for a rank that fails, or that does not go on, while
        this one waits for it. check: raises where what a call gave here means nothing after all.
        """
        self.geometry = geometry
        self.replay: ReplayConfig = own.replay
        self.pool: PoolConfig = own.pool
        self._own = own
        self._parts = RankParts(own)
        self._workers = list(workers)
        self._check = check
        self._watch = RankWatch(workers, give_up, patience=patience, marks=marks, limit=limit)
        self._closer = weakref.finalize(self, _close, self._watch, hang_up)

    @property
    def own(self) -> Session:
        """The first rank's own session: what it tells is true of every rank's; it must not be moved alone."""
        return self._own

    def make_part(self, name: str, maker: Maker, *arguments: Any) -> Any:
        """maker(session, *arguments) on every rank, over the rank's session -> the first rank's; see `call_part`."""
        self._first(MAKE, name, maker, *arguments)
        return self._parts.part(name)

    def call_part(self, name: str, method: str, *arguments: Any) -> Any:
        """The same call of what `make_part` made, on every rank -> the first rank's answer."""
        return self._first(f"{name}.{method}", *arguments)

    def close(self) -> None:
        """See `Session.close`: the other ranks' processes; also done when the last reference goes."""
        self._own.close()
        self._closer()

    @property
    def signature(self) -> str:
        """See `Session.signature`: a replica over another number of ranks has another one."""
        return f"{self._own.signature}, {1 + len(self._workers)} ranks"

    @property
    def free_slots(self) -> int:
        """See `Session.free_slots`."""
        return self._own.free_slots

    def warm_up(self) -> None:
        """See `Session.warm_up`."""
        self._first("warm_up")

    def allocate(self, seed: int) -> int:
        """See `Session.allocate`."""
        return int(self._first("allocate", seed))

    def free(self, slot: int) -> None:
        """See `Session.free`."""
        self._first("free", slot)

    def fork(self, slot: int, seed: int) -> int:
        """See `Session.fork`."""
        return int(self._first("fork", slot, seed))

    def save(self, slot: int, since: int = 0) -> SlotSnapshot:
        """See `Session.save`."""
        return SharedSnapshot(tuple(self._all("save", lambda _: (slot, since))))

    def restore(
        self, snapshot: SlotSnapshot, *, seed: int | None = None, before: Sequence[SlotSnapshot] = ()
    ) -> int:
        """See `Session.restore`."""
        chain = [_shared(part) for part in (*before, snapshot)]
        arguments = [{"seed": seed, "before": [p.parts[r] for p in chain[:-1]]} for r in range(1 + len(self._workers))]
        slots = self._all("restore", lambda rank: (chain[-1].parts[rank],), lambda rank: arguments[rank])
        return int(slots[0])

    def load_snapshot(self, position: int, arrays: Mapping[str, RawArray], *, prompt_done: bool) -> SlotSnapshot:
        """See `Session.load_snapshot`."""
        ranks = 1 + len(self._workers)
        parts: list[dict[str, RawArray]] = [{} for _ in range(ranks)]
        for name, array in arrays.items():
            rank, _, own = name.partition("/")
            if not rank.isdigit() or int(rank) >= ranks:
                raise ContractError("load_snapshot", name, expected=f"a name of one of {ranks} ranks", got=name)
            parts[int(rank)][own] = array
        replies = self._ask(
            "load_snapshot", lambda rank: (position, parts[rank]), lambda _: {"prompt_done": prompt_done}
        )
        for number, (met, _) in enumerate(replies):  # nothing has moved, so one rank may refuse what others take
            if isinstance(met, Exception):
                raise met
            if met is not None:
                raise ContractError("load_snapshot", f"arrays of rank {number}", expected="a state that fits", got=met)
        return SharedSnapshot(tuple(answer for _, answer in replies))

    def cursors(self, slot: int) -> SlotCursors:
        """See `Session.cursors`: they are the same on every rank."""
        return self._own.cursors(slot)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Logits | None]:
        """See `Session.prefill`."""
        answer: list[Logits | None] = self._first("prefill", list(chunks))
        return answer

    def decode(self, rows: Sequence[DecodeRow]) -> list[Logits]:
        """See `Session.decode`."""
        answer: list[Logits] = self._first("decode", list(rows))
        return answer

    def commit(self, accepted: Sequence[int]) -> None:
        """See `Session.commit`."""
        self._first("commit", list(accepted))

    def mtp_begin(self, rows: Sequence[MtpRow]) -> list[Logits]:
        """See `Session.mtp_begin`."""
        answer: list[Logits] = self._first("mtp_begin", list(rows))
        return answer

    def mtp_next(self, tokens: Sequence[int]) -> list[Logits]:
        """See `Session.mtp_next`."""
        answer: list[Logits] = self._first("mtp_next", list(tokens))
        return answer

    def check_integrity(self) -> None:
        """See `Session.check_integrity`: of every rank."""
        self._first("check_integrity")

    def _first(self, method: str, *arguments: Any) -> Any:
        """Run the same call everywhere -> the first rank's answer; those of the others stay there."""
        return self._all(method, lambda _: arguments, wanted=False)[0]

    def _all(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        keywords: Callable[[int], dict[str, Any]] = lambda _: {},
        *,
        wanted: bool = True,
    ) -> list[Any]:
        """Run a call on every rank with the rank's own arguments -> their answers, those of others if `wanted`."""
        (failure, own), *replies = self._ask(method, arguments, keywords, wanted=wanted)
        for rank, (met, _) in enumerate(replies, 1):
            if (met is None) != (failure is None):
                raise InvariantError(
                    method, f"rank {rank}", expected=f"what rank 0 met: {failure or 'no error'}",
                    got=met or "no error", hint="The ranks no longer agree: restart the replica",
                )  # fmt: skip
        if isinstance(failure, Exception):
            raise failure
        return [own, *(answer for _, answer in replies)]

    def _ask(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        keywords: Callable[[int], dict[str, Any]],
        *,
        wanted: bool = True,
    ) -> list[tuple[Exception | str | None, Any]]:
        """Run a call on every rank -> what each met (of other ranks as text) and answered.

        Every answer is read whatever the others are, so that none is taken for that of a later call.
        """
        for rank, worker in enumerate(self._workers, 1):
            try:
                worker.send((method, arguments(rank), keywords(rank), wanted))
            except OSError as gone:
                raise _failed(method, rank, ENDED) from gone
        replies: list[tuple[Exception | str | None, Any]] = []
        with self._watch:
            try:
                answer = self._parts.call(method, arguments(0), keywords(0))
                self._check()
                replies.append((None, answer))
            except Exception as error:
                replies.append((error, None))
        if self._watch.culprit is not None:
            raise _failed(method, *self._watch.culprit)
        for rank in range(1, 1 + len(self._workers)):
            reply = self._watch.answer(rank)
            if reply is None:
                raise _failed(method, *(self._watch.culprit or (rank, ENDED)))
            replies.append(reply)
        return replies


def _failed(method: str, rank: int, met: str) -> InvariantError:
    return InvariantError(
        method, f"rank {rank}", expected="an answer", got=met, hint="The ranks no longer agree: restart the replica"
    )


def _close(watch: RankWatch, hang_up: Callable[[], None]) -> None:
    watch.stop()
    hang_up()


def _shared(snapshot: SlotSnapshot) -> SharedSnapshot:
    assert isinstance(snapshot, SharedSnapshot), "a snapshot comes from `save`"
    return snapshot
