"""Engines over the fake session, and the words that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Sequence

from tests.runtime.fake_session import FakeSession, Model, geometry, hash_model, script_model
from tests.runtime.fake_steps import device_steps
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.runtime.device_loop import Steps
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput, request_output
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.session.base import Logits
from trtllm_replayssm.runtime.speculative.drafter import Draft, DraftContext, Drafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.step import SessionHead
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer

VOCAB = 24
DRAFTERS = ("plain", "ngram", "mtp", "mtp-sampled")
NO_END = -1


class PieceTokenizer:
    """Token i is pieces[i], as bytes; bytes that are no UTF-8 decode to U+FFFD. Ids in `special` decode to nothing."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self.pieces = list(pieces)
        self.special = frozenset(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids = text.encode(), []
        while data:
            best = max((p for p in self.pieces if p and data.startswith(p)), key=len)
            ids.append(self.pieces.index(best))
            data = data[len(best) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special)]
        return b"".join(self.pieces[i] for i in kept).decode("utf-8", "replace")


class OracleDrafter:
    """Drafts the tokens of a script that is known to come, whatever the text so far."""

    def __init__(self, script: Sequence[int], prompt_len: int, max_draft_len: int) -> None:
        self.script = list(script)
        self.prompt_len = prompt_len
        self.max_draft_len = max_draft_len

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = []
        for context in contexts:
            done = len(context.tokens) - self.prompt_len
            count = min(context.room, self.max_draft_len)
            drafts.append(Draft(tuple(self.script[done : done + count])))
        return drafts


class Driver:
    """Steps an engine, and keeps what came out of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.done: dict[int, RequestOutput] = {}

    def add(self, prompt: Sequence[int] | str, *, priority: float = 0.5, **settings: object) -> int:
        return self.engine.add_request(prompt, SamplingParams(**settings), priority=priority)  # type: ignore[arg-type]

    def step(self) -> None:
        for request in self.engine.step():
            if request.finished:
                self.done[request.request_id] = request_output(request)

    def run(self, max_steps: int = 2000) -> dict[int, RequestOutput]:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return self.done
            self.step()
        raise AssertionError(f"work left after {max_steps} steps")

    def one(self, prompt: Sequence[int] | str, **settings: object) -> CompletionOutput:
        """Run one request alone -> its first choice."""
        number = self.add(prompt, **settings)
        return self.run()[number].outputs[0]


class Bench(Driver):
    """An engine over a session without a model."""

    def __init__(self, engine: Engine, session: FakeSession) -> None:
        super().__init__(engine)
        self.session = session


def bench(
    kind: str = "plain",
    *,
    model: Model | None = None,
    head_model: Model | None = None,
    vocab: int = VOCAB,
    eos_ids: tuple[int, ...] = (0,),
    slots: int = 4,
    batch: int | None = None,
    max_seq_len: int = 64,
    draft_len: int = 3,
    window: int = 8,
    max_num_tokens: int | None = None,
    chunk: int | None = None,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    drafter: Drafter | None = None,
    prefix: PrefixConfig | None = None,
    max_preempted: int | None = None,
    ahead: bool = False,
    steps: Steps | None = None,
    debug: bool = True,
) -> Bench:
    """An engine. kind: one of DRAFTERS, unless a drafter is given; ahead: with a device loop, over `steps` if given."""
    session = FakeSession(
        model or hash_model(vocab),
        slots=slots,
        max_seq_len=max_seq_len,
        replay=ReplayConfig(window=window, max_step_tokens=1 + draft_len),
        geometry=geometry(vocab, eos_ids),
        head_model=head_model,
    )
    drafters: dict[str, Drafter | None] = {
        "plain": None,
        "ngram": NGramDrafter(draft_len, 3),
        "mtp": MtpDrafter(SessionHead(session), draft_len),
        "mtp-sampled": MtpDrafter(SessionHead(session), draft_len, sample=True),
    }
    batch = batch or slots
    config = EngineConfig(
        max_batch_size=batch,
        max_num_tokens=max_num_tokens or batch * (1 + draft_len) + 16,
        prefill_chunk=chunk,
        seed=seed,
        debug=debug,
        prefix=prefix,
        max_preempted=max_preempted,
    )
    if ahead and steps is None:
        steps = device_steps(session, kind, draft_len)
    return Bench(Engine(session, drafter or drafters[kind], tokenizer, config, steps), session)


def scripted(
    script: Sequence[int], *, prompt_len: int = 1, draft_len: int = 5, tokenizer: Tokenizer | None = None,
    drafts: bool = True, vocab: int = 64, eos_ids: tuple[int, ...] = (),
) -> Bench:  # fmt: skip
    """An engine whose model answers any prompt of prompt_len tokens with `script`, with drafts that all agree."""
    return bench(
        model=script_model(vocab, prompt_len, script),
        vocab=vocab,
        eos_ids=eos_ids,
        draft_len=draft_len,
        tokenizer=tokenizer,
        drafter=OracleDrafter(script, prompt_len, draft_len) if drafts else None,
    )


def noisy(model: Model, other: Model, every: int) -> Model:
    """`model`, but `other` where the last two tokens add up to a multiple of `every`: a head that is often right."""

    def logits(tokens: Sequence[int]) -> Logits:
        return (other if sum(tokens[-2:]) % every == 0 else model)(tokens)

    return logits
