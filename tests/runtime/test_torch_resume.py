"""Whole models: moved to host memory or through a file, a request's tokens and its slot's bytes stay the same (B17)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.prefix.torch_engines import FORMATS, SAMPLED, WITH_HEAD, TorchBench, prompt
from tests.session.sessions import FAMILIES
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.runtime.transfer import container

WINDOW = 8
CASES = [
    *((name, kind) for name in FAMILIES for kind in ("plain", "ngram")),
    (WITH_HEAD, "mtp"),
    (WITH_HEAD, "mtp-sampled"),
]
SETTINGS = {**SAMPLED, "max_tokens": 12, "temperature": 0.3}  # cool enough to repeat itself, so that n-grams match
PROMPT_STEPS = 3  # 20 tokens in chunks of 8


def begin(name: str, kind: str, formats: str) -> tuple[TorchBench, int]:
    bench = TorchBench(name, kind, formats=formats, chunk=8)
    return bench, bench.add(prompt(name, 20), **SETTINGS)


@cache
def uninterrupted(name: str, kind: str, formats: str) -> tuple[list[int], list[str], list[int]]:
    """Tokens; the slot's hash after each step; the records pending then.

    Without the last steps, for which nothing is drafted: the head's own keys and values are then free memory.
    """
    bench, number = begin(name, kind, formats)
    hashes, pending = [], []
    while bench.engine.has_work:
        bench.step()
        if drafts_follow(bench):
            hashes.append(bench.session.pools.slot_hash(0))
            pending.append(bench.session.cursors(0).h)
    assert kind == "plain" or bench.engine.stats.drafted_tokens > 0
    return bench.done[number].outputs[0].token_ids, hashes, pending


def drafts_follow(bench: TorchBench) -> bool:
    return any(choice.output.room > 1 for choice in bench.engine._scheduler.resident)


def places(pending: list[int]) -> list[int]:
    """Steps to break after: between two chunks, and the first with h = 0, 1, L - 1 and anything else."""
    found = {h: PROMPT_STEPS + 1 + i for i, h in reversed(list(enumerate(pending[PROMPT_STEPS - 1 :], -1)))}
    return [1, *(found[h] for h in (0, 1, WINDOW - 1) if h in found), max(found.values())]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("formats", FORMATS)
def test_b17_preempted_or_through_a_file_the_slot_and_the_tokens_are_the_same(
    name: str, kind: str, formats: str, tmp_path: Path
) -> None:
    """At h = 0, 1, L - 1, between chunks, with drafts at hand; into another slot, seed and roundings included."""
    tokens, hashes, pending = uninterrupted(name, kind, formats)
    steps = places(pending)
    assert kind != "plain" or {0, 1, WINDOW - 1} <= {pending[s - 1] for s in steps}
    for when in steps:
        for way in ("preempt", "file"):
            bench, number = begin(name, kind, formats)
            for _ in range(when):
                bench.step()
            choice = bench.engine._scheduler.resident[0]
            drafted = choice.draft
            if way == "file":
                bench.engine.export_request(number, tmp_path / "request")
                bench, _ = begin(name, kind, formats)
                bench.engine.cancel(0)
                number = bench.engine.import_request(tmp_path / "request")
                assert bench.engine._requests[number].choices[0].draft.tokens == drafted.tokens
            else:
                bench.engine.preempt(number)
            bench.session.allocate(99)  # takes slot 0
            found = []
            while bench.engine.has_work:
                bench.step()
                if drafts_follow(bench):
                    assert bench.engine._scheduler.resident[0].slot == 1
                    found.append(bench.session.pools.slot_hash(1))
            assert bench.done[number].outputs[0].token_ids == tokens
            assert found == hashes[when:]


@pytest.mark.parametrize("formats", ["float32", "float16-nvfp4"])
def test_choices_go_on_from_a_file_written_while_one_of_them_is_preempted(formats: str, tmp_path: Path) -> None:
    """Sampled drafts at hand, records pending, two precisions; from every step on, through two files in a row."""
    settings = {**SETTINGS, "n": 2, "max_tokens": 30}

    def machine() -> TorchBench:
        return TorchBench(WITH_HEAD, "mtp-sampled", formats=formats, chunk=8)

    plain = machine()
    number = plain.add(prompt(WITH_HEAD, 20), **settings)
    want = [o.token_ids for o in plain.run()[number].outputs]
    drafted = 0
    for when in range(1, 9, 2):
        bench = machine()
        number = bench.add(prompt(WITH_HEAD, 20), **settings)
        for _ in range(when):
            bench.step()
        for _ in range(2):
            bench.engine._to_host(bench.engine._requests[number].choices[-1])
            drafted += sum(len(choice.draft) for choice in bench.engine._requests[number].choices)
            bench.engine.export_request(number, tmp_path / "request")
            bench = machine()
            number = bench.engine.import_request(tmp_path / "request")
            bench.step()
        assert [o.token_ids for o in bench.run()[number].outputs] == want
    assert drafted > 0


@pytest.mark.parametrize("name", [*FAMILIES, WITH_HEAD])
def test_i18_forks_are_moved_one_by_one_and_all_end_as_alone(name: str) -> None:
    """I18: n = 2 with a seed, distinct and reproducible, also when a higher priority takes one of their slots."""
    kind = "mtp" if name == WITH_HEAD else "ngram"
    settings = {**SETTINGS, "n": 2}
    plain = TorchBench(name, kind, block=16)
    number = plain.add(prompt(name, 20), **settings)
    want = [o.token_ids for o in plain.run()[number].outputs]
    bench = TorchBench(name, kind, block=16)
    group = bench.add(prompt(name, 20), priority=0.2, **settings)
    for _ in range(4):
        bench.step()
    bench.add(prompt(name, 9, 3), priority=0.8, max_tokens=4, end_id=-1)
    bench.run()
    assert bench.engine.stats.preemptions == 1
    assert [o.token_ids for o in bench.done[group].outputs] == want and want[0] != want[1]


def test_a_prompt_in_progress_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    """The slot's carry says that its checkpoint means nothing yet, whatever the document says."""
    name = FAMILIES[0]
    bench, number = begin(name, "plain", "float32")
    bench.step()
    bench.engine.export_request(number, tmp_path / "request")
    found = container.read(tmp_path / "request")
    request = found.document["request"]
    request["prompt_ids"] = request["prompt_ids"][:8]
    request["choices"][0]["token_ids"] = [5]
    if request["choices"][0]["logprobs"] is not None:
        request["choices"][0]["logprobs"] = [[[5, -1.0, 1]]]
    assert request["choices"][0]["position"] == request["choices"][0]["prefilled"] == 8
    container.write(tmp_path / "request", found.document, found.arrays)
    with pytest.raises(CheckpointError, match="carry"):
        bench.engine.import_request(tmp_path / "request")
    bench.run()
