"""A session without a model, for everything above the session.

Its language model is a function of the last few tokens a slot has really committed, so a lost, doubled or misplaced
commit changes the text. It checks the protocol as it goes: commit after decode, one use of a slot per call, live
slots only, no write past the sequence limit, hidden states and draft-head positions in step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import CapacityError, ContractError, InvariantError
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk, RawArray, SlotCursors
from trtllm_replayssm.shapes import AttentionShape, Family, LayerKind, ModelGeometry, SsmKind, SsmShape
from trtllm_replayssm.spec.cursors import Cursors, commit, finish_prefill, flushes

Model = Callable[[Sequence[int]], Logits]


def geometry(vocab: int = 24, eos_ids: tuple[int, ...] = (0,)) -> ModelGeometry:
    """A small hybrid geometry; only vocab, eos_ids and the SSM sizes matter here."""
    return ModelGeometry(
        family=Family.QWEN3_5,
        name="fake",
        hidden=32,
        vocab=vocab,
        layers=(LayerKind.SSM, LayerKind.ATTENTION, LayerKind.SSM),
        ssm=SsmShape(kind=SsmKind.GDN, heads=4, groups=2, head_dim=16, state_dim=32, conv_kernel=4, conv_bias=False),
        attention=AttentionShape(heads=4, kv_heads=2, head_dim=8),
        mlp_intermediate=64,
        moe=None,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_positions=4096,
        eos_ids=eos_ids,
        bos_id=None,
        pad_id=None,
        mtp_pattern=(LayerKind.ATTENTION,),
    )


GEOMETRY = geometry()


def hash_model(vocab: int, *, order: int = 3, sharpness: float = 3.0, salt: int = 0) -> Model:
    """Logits [vocab] drawn from a generator seeded by the last `order` tokens."""

    def logits(tokens: Sequence[int]) -> Logits:
        key = [salt, len(tokens) == 0, *tokens[-order:]]
        return (np.random.default_rng(key).standard_normal(vocab) * sharpness).astype(np.float32)

    return logits


def script_model(vocab: int, prompt_len: int, script: Sequence[int]) -> Model:
    """Whatever it is given, position prompt_len + i is best continued by script[i]; the last one repeats."""

    def logits(tokens: Sequence[int]) -> Logits:
        row = np.zeros(vocab, np.float32)
        row[script[min(max(len(tokens) - prompt_len, 0), len(script) - 1)]] = 10.0
        return row

    return logits


def failing(model: Model, *, first: int, length: int) -> Model:
    """`model`, but NaN behind more than `length` tokens of a text that begins with `first`."""

    def logits(tokens: Sequence[int]) -> Logits:
        row = model(tokens)
        return np.full_like(row, np.nan) if tokens[0] == first and len(tokens) > length else row

    return logits


@dataclass
class Slot:
    """What a slot remembers. hidden: positions whose hidden states the last step left; head: MTP keys and values."""

    tokens: list[int] = field(default_factory=list)
    cursors: Cursors = field(default_factory=Cursors)
    hidden: int = 0
    head: list[int] = field(default_factory=list)

    def copy(self) -> Slot:
        return Slot(list(self.tokens), replace(self.cursors), self.hidden, list(self.head))

    @property
    def position(self) -> int:
        return len(self.tokens)


STATE_BYTES = 1000


@dataclass(frozen=True)
class FakeSnapshot:
    """tokens, head: of positions first..position; state: None when only these are left."""

    position: int
    first: int
    tokens: tuple[int, ...]
    head: tuple[int, ...]
    state: Slot | None
    unfinished: bool = False

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens) + (0 if self.state is None else STATE_BYTES)

    def kv_only(self) -> FakeSnapshot:
        return replace(self, state=None)

    def arrays(self) -> dict[str, RawArray]:
        assert self.state is not None and self.first == 0
        c = self.state.cursors
        numbers = {
            "tokens": self.tokens, "head": self.head, "cursors": (c.origin, c.h, c.position),
            "seed": (c.seed & 0xFFFFFFFF, c.seed >> 32), "flags": (self.state.hidden, int(self.unfinished)),
        }  # fmt: skip
        return {name: ("int64", (len(v),), array("q", v).tobytes()) for name, v in numbers.items()}


class FakeSession:
    """See the module. `head_model` predicts for the draft head; `decode_sizes` logs the rows of each decode."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 4,
        max_seq_len: int = 64,
        replay: ReplayConfig | None = None,
        geometry: ModelGeometry = GEOMETRY,
        head_model: Model | None = None,
    ) -> None:
        self.geometry = geometry
        self.replay = replay or ReplayConfig(window=8, max_step_tokens=4)
        self.pool = PoolConfig(slots=slots, max_seq_len=max_seq_len)
        self.model = model
        self.head_model = head_model or model
        self.live: dict[int, Slot] = {}
        self.owners: list[int] = []  # every slot ever handed out, in order
        self.flushes = 0
        self.decode_sizes: list[list[int]] = []
        self.prefill_sizes: list[list[int]] = []
        self.unfinished: set[int] = set()  # slots between two chunks of a prompt
        self._pending: list[tuple[int, tuple[int, ...]]] | None = None
        self._drafting: list[int] = []

    @property
    def free_slots(self) -> int:
        return self.pool.slots - len(self.live)

    def warm_up(self) -> None:
        """Nothing is made lazily here."""

    def allocate(self, seed: int) -> int:
        return self._take(Slot(cursors=Cursors(seed=seed)))

    def free(self, slot: int) -> None:
        if self._pending is not None:
            raise InvariantError("fake.free", "slot", expected="commit first", got=slot)
        del self.live[slot]
        self.unfinished.discard(slot)

    def fork(self, slot: int, seed: int) -> int:
        copy = self.live[slot].copy()
        copy.cursors.seed = seed
        return self._take(copy)

    @property
    def signature(self) -> str:
        return f"{self.geometry.name} {self.geometry.vocab} {self.replay}"

    def save(self, slot: int, since: int = 0) -> FakeSnapshot:
        if self._pending is not None:
            raise InvariantError("fake.save", "slot", expected="commit first", got=slot)
        state = self.live[slot].copy()
        state.hidden = min(state.hidden, 1)
        head = state.head[since : state.position]
        return FakeSnapshot(
            state.position, since, tuple(state.tokens[since:]), tuple(head), state, slot in self.unfinished
        )

    def restore(
        self, snapshot: FakeSnapshot, *, seed: int | None = None, before: Sequence[FakeSnapshot] = ()
    ) -> int:
        """Attention would see the tokens of the snapshots, the recurrence those of the state: they must agree."""
        assert snapshot.state is not None, "restored keys and values without their state"
        slot = snapshot.state.copy()
        tokens: list[int] = []
        head: list[int] = []
        for part in (*before, snapshot):
            assert part.first <= len(tokens), "positions are missing"
            tokens[part.first :] = part.tokens
            head[part.first :] = part.head
        if tokens != slot.tokens or slot.cursors.position != snapshot.position:
            raise InvariantError("fake.restore", "tokens", expected=slot.tokens, got=tokens)
        slot.head = head
        if seed is not None:
            slot.cursors.seed = seed
        number = self._take(slot)
        if snapshot.unfinished:
            self.unfinished.add(number)
        return number

    def load_snapshot(self, position: int, arrays: Mapping[str, RawArray], *, prompt_done: bool) -> FakeSnapshot:
        found = {name: tuple(array("q", data)) for name, (_, _, data) in arrays.items()}
        origin, h, known = found["cursors"]
        if known != position or len(found["tokens"]) != position:
            raise ContractError("load_snapshot", "position", expected=known, got=position)
        if prompt_done and found["flags"][1]:
            raise ContractError("load_snapshot", "flags", expected="a complete prompt", got="an unfinished one")
        cursors = Cursors(origin=origin, h=h, position=known, seed=found["seed"][0] | found["seed"][1] << 32)
        state = Slot(list(found["tokens"]), cursors, found["flags"][0], list(found["head"]))
        return FakeSnapshot(position, 0, found["tokens"], found["head"], state, bool(found["flags"][1]))

    def cursors(self, slot: int) -> SlotCursors:
        c = self.live[slot].cursors
        return SlotCursors(c.origin, c.h, c.position, c.seed)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Logits | None]:
        self._enter([c.slot for c in chunks])
        self.prefill_sizes.append([len(c.tokens) for c in chunks])
        results: list[Logits | None] = []
        for chunk in chunks:
            slot = self._writable(chunk.slot, len(chunk.tokens))
            slot.tokens += chunk.tokens
            slot.hidden = len(chunk.tokens)
            (self.unfinished.discard if chunk.last else self.unfinished.add)(chunk.slot)
            finish_prefill(slot.cursors, len(chunk.tokens))
            results.append(self.model(slot.tokens) if chunk.last else None)
        return results

    def decode(self, rows: Sequence[DecodeRow]) -> list[Logits]:
        self._enter([r.slot for r in rows])
        self.decode_sizes.append([len(r.tokens) for r in rows])
        results = []
        for row in rows:
            if not 1 <= len(row.tokens) <= self.replay.max_step_tokens:
                raise InvariantError("fake.decode", "tokens", expected=self.replay.max_step_tokens, got=row.tokens)
            slot = self._writable(row.slot, len(row.tokens))
            if row.slot in self.unfinished:
                raise InvariantError("fake.decode", "slot", expected="a complete prompt", got=row.slot)
            ahead = [[*slot.tokens, *row.tokens[: i + 1]] for i in range(len(row.tokens))]
            results.append(np.stack([self.model(tokens) for tokens in ahead]))
        self._pending = [(r.slot, tuple(r.tokens)) for r in rows]
        return results

    def commit(self, accepted: Sequence[int]) -> None:
        if self._pending is None or len(accepted) != len(self._pending):
            raise InvariantError("fake.commit", "accepted", expected=self._pending, got=accepted)
        for (number, tokens), count in zip(self._pending, accepted, strict=True):
            count = min(max(count, 0), len(tokens))
            slot = self.live[number]
            self.flushes += flushes(self.replay, slot.cursors.h, len(tokens))
            commit(self.replay, slot.cursors, len(tokens), count)
            slot.tokens += tokens[:count]
            slot.hidden = count
        self._pending = None

    def mtp_begin(self, rows: Sequence[MtpRow]) -> list[Logits]:
        self._enter([r.slot for r in rows])
        results = []
        for row in rows:
            slot = self.live[row.slot]
            first = slot.position - slot.hidden
            followers = slot.tokens[first + 1 :]
            if len(row.next_tokens) != slot.hidden or list(row.next_tokens[:-1]) != followers:
                raise InvariantError("fake.mtp_begin", "next_tokens", expected=followers, got=row.next_tokens)
            del slot.head[first:]  # drafts of the step before
            if len(slot.head) != first:
                raise InvariantError("fake.mtp_begin", "head", expected=first, got=len(slot.head))
            slot.head += row.next_tokens
            results.append(self.head_model([slot.tokens[0], *slot.head]))
        self._drafting = [r.slot for r in rows]
        return results

    def mtp_next(self, tokens: Sequence[int]) -> list[Logits]:
        if len(tokens) != len(self._drafting):
            raise InvariantError("fake.mtp_next", "tokens", expected=len(self._drafting), got=len(tokens))
        results = []
        for number, token in zip(self._drafting, tokens, strict=True):
            slot = self.live[number]
            slot.head.append(token)
            if len(slot.head) > self.pool.max_seq_len:
                raise InvariantError("fake.mtp_next", "head", expected=self.pool.max_seq_len, got=len(slot.head))
            results.append(self.head_model([slot.tokens[0], *slot.head]))
        return results

    def check_integrity(self) -> None:
        for number, slot in self.live.items():
            if slot.cursors.position != slot.position or slot.cursors.h > self.replay.window:
                raise InvariantError("fake", f"slot {number}", expected=slot.position, got=slot.cursors)

    def close(self) -> None:
        pass

    def _take(self, slot: Slot) -> int:
        for number in range(self.pool.slots):
            if number not in self.live:
                self.live[number] = slot
                self.owners.append(number)
                return number
        raise CapacityError("fake.allocate", "slot", expected=f"at most {self.pool.slots}", got="one more")

    def _enter(self, slots: Sequence[int]) -> None:
        if self._pending is not None:
            raise InvariantError("fake", "call", expected="commit after decode", got="another call")
        if len(set(slots)) != len(slots) or not set(slots) <= set(self.live):
            raise InvariantError("fake", "slots", expected=sorted(self.live), got=slots)

    def _writable(self, number: int, count: int) -> Slot:
        slot = self.live[number]
        if count < 1 or slot.position + count > self.pool.max_seq_len:
            raise InvariantError("fake", "positions", expected=self.pool.max_seq_len, got=slot.position + count)
        return slot
