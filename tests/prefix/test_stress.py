"""Random traffic over shared prefixes and a small budget: whatever is kept, dropped, moved out, cancelled or written to
a file, every request gets its solo answer, and the cache stays within its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.prefix.torch_engines import WITH_HEAD, TorchBench, prompt
from tests.runtime.fake_session import STATE_BYTES, hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, bench, noisy
from tests.session.sessions import FAMILIES
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig

MODEL = hash_model(VOCAB, sharpness=2.0)
HEAD = noisy(MODEL, hash_model(VOCAB, salt=9), every=3)
# A token drawn with sampled drafts depends on where the drafts began: only one-hot drafts promise the solo text.
KINDS = tuple(kind for kind in DRAFTERS if kind != "mtp-sampled")
TREE = [[1] * 9, [1] * 6 + [2] * 11, [1] * 6 + [2] * 7 + [3] * 5, [4] * 13, [1] * 24]


@dataclass(frozen=True)
class Ask:
    """One request: a path of the tree of prompts and a tail of its own."""

    base: int
    keep: int
    tail: tuple[int, ...]
    max_tokens: int
    seed: int
    n: int
    priority: float

    @property
    def prompt(self) -> list[int]:
        return [*TREE[self.base][: self.keep], *self.tail]

    def settings(self) -> dict[str, object]:
        sampled = {} if self.seed == 0 else {"temperature": 0.8, "top_k": 6}
        return {"max_tokens": self.max_tokens, "seed": self.seed, "n": self.n, "frequency_penalty": 0.2, **sampled}


@cache
def solo(ask: Ask) -> list[tuple[list[int], str | None]]:
    machine = bench(model=MODEL, slots=3, max_seq_len=48)
    number = machine.add(ask.prompt, **ask.settings())
    return [(o.token_ids, o.finish_reason) for o in machine.run()[number].outputs]


def ask(random: Random) -> Ask:
    return Ask(
        base=random.randrange(len(TREE)), keep=random.choice([6, 9, 13, 24]),
        tail=tuple(random.choices(range(1, 4), k=random.randint(1, 4))), max_tokens=random.randint(1, 12),
        seed=random.randrange(3), n=random.choice([1, 1, 1, 2, 3]), priority=random.choice([0.2, 0.5, 0.5, 0.9]),
    )  # fmt: skip


def disturb(machine: Bench, what: str, number: int, folder: Path) -> tuple[int | None, bool]:
    """Cancel, preempt or move a request through a file -> (its new number, None when it is not here; cancelled)."""
    if number not in machine.engine._requests:
        return None, False
    if what == "preempt":
        count, free = machine.engine.stats.preemptions, machine.session.free_slots
        machine.engine.preempt(number)
        assert machine.engine.stats.preemptions - count == machine.session.free_slots - free
    elif what == "cancel":
        machine.engine.cancel(number)
        return number, True
    else:
        machine.engine.export_request(number, folder / "request")
        machine.engine.cancel(number)
        number = machine.engine.import_request(folder / "request")
    return number, False


def require_counters(machine: Bench, budget: int) -> None:
    """What the counters say after any traffic, and what they must say after a known one behind it.

    One state more than the budget has room for drops one; the turn after the prompt that came last begins at its state.
    """
    stats = machine.engine.stats.prefix
    assert stats.insertions - stats.evictions == stats.entries and stats.hits <= stats.lookups
    before, number = replace(stats), 0
    for token in range(5, 6 + budget // STATE_BYTES):
        number = machine.add([token] * 24, max_tokens=1)
        machine.run()
    assert stats.refused == before.refused and stats.insertions - stats.evictions == stats.entries
    assert stats.evictions > before.evictions and stats.hits == before.hits
    machine.add([*[token] * 24, *machine.done[number].outputs[0].token_ids, 1], max_tokens=1)
    machine.run()
    assert stats.hits == before.hits + 1


@pytest.mark.parametrize("seed", range(30))
def test_every_request_over_shared_prefixes_gets_its_solo_answer(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    kind, budget = KINDS[seed % len(KINDS)], random.randint(2, 6) * STATE_BYTES + 400
    machine = bench(
        kind, model=MODEL, head_model=HEAD, slots=3, max_seq_len=48, chunk=random.randint(1, 9), window=4, draft_len=2,
        prefix=PrefixConfig(block=random.randint(1, 6), budget=budget, outputs=random.random() < 0.5, history=20),
    )  # fmt: skip
    asked: dict[int, Ask] = {}
    cancelled = 0
    for _ in range(60):
        new_ask = ask(random)
        asked[machine.add(new_ask.prompt, priority=new_ask.priority, **new_ask.settings())] = new_ask
        for _ in range(random.randint(0, 9)):
            machine.step()
            assert machine.engine.stats.prefix.bytes <= budget
        if random.random() < 0.5:
            old = random.choice([*machine.engine._requests, *asked][: len(machine.engine._requests) + 1])
            new, gone = disturb(machine, random.choice(["cancel", "preempt", "preempt", "file"]), old, tmp_path)
            if new is not None:
                moved = asked.pop(old)
                cancelled += gone
                if not gone:
                    asked[new] = moved
    machine.run()
    assert machine.session.free_slots == 3 and not machine.engine.prefix._keys  # type: ignore[union-attr]
    assert asked.keys() <= machine.done.keys() and len(asked) == 60 - cancelled
    for number, one in asked.items():
        assert [(o.token_ids, o.finish_reason) for o in machine.done[number].outputs] == solo(one)
    require_counters(machine, budget)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, WITH_HEAD])
def test_random_traffic_over_whole_models_gets_the_solo_text(name: str) -> None:
    """Greedy, float32: the solo token wherever the solo run's first two candidates are apart by more than its noise."""
    random = Random(3)
    kind = "mtp" if name == WITH_HEAD else "ngram"
    prompts = [[*prompt(name, 16 * random.randint(1, 4), start), *prompt(name, random.randint(1, 7), 90 + i)]
               for i, start in enumerate(random.choices([0, 0, 0, 40, 77], k=24))]  # fmt: skip
    sizing = TorchBench(name, kind, block=16)
    sizing.one(prompts[0], max_tokens=1)
    budget = 5 * max(e.size for e in sizing.entries)
    machine = TorchBench(name, kind, block=16, slots=3, budget=budget, chunk=32)
    numbers = []
    for ids in prompts:
        numbers.append(machine.add(ids, priority=random.choice([0.2, 0.5, 0.8]), max_tokens=10, end_id=-1))
        for _ in range(random.randint(0, 6)):
            machine.step()
            assert machine.engine.stats.prefix.bytes <= budget
        if random.random() < 0.3:
            machine.engine.preempt(random.choice(numbers))
    machine.run()
    stats = machine.engine.stats
    assert stats.prefix.insertions - stats.prefix.evictions == stats.prefix.entries
    assert stats.prefix.hits and stats.prefix.evictions and stats.preemptions
    compared = 0
    for number, ids in zip(numbers, prompts, strict=True):
        alone = TorchBench(name).one(ids, max_tokens=10, end_id=-1, logprobs=2)
        for i, token in enumerate(machine.done[number].outputs[0].token_ids):
            best, second = sorted((e.logprob for e in alone.logprobs[i].values()), reverse=True)[:2]  # type: ignore[index]
            if best - second < 0.02:  # GDN corrections that round the other way move logits by this much
                break
            assert token == alone.token_ids[i]
            compared += 1
    assert compared > 100
