"""The judge of long runs, and the traffic that it judges, on a CPU: what they let pass and what they find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.cpu_judge import Text, forced, judge, longest, verdict
from tests.runtime.cpu_workers import CpuWorkers
from tests.runtime.steady_traffic import SteadyTraffic, prompts
from tests.runtime.torch_loops import DRAFTS, make_engine
from tests.session.sessions import open_session
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk, Session
from trtllm_replayssm.runtime.session.torch_session import TorchSession

ROWS = 6


def session(*, conventional: bool = False) -> TorchSession:
    return open_session("qwen-dense", slots=ROWS + 1, widest=1 + DRAFTS, conventional=conventional)


@pytest.mark.parametrize("kind", ["plain", "ngram"])
def test_traffic_gives_the_cpu_s_text(kind: str) -> None:
    own = session()
    engine = make_engine(own, kind, ahead=True)
    steps: list[int] = []
    traffic = SteadyTraffic(engine, prompts(5, 60, seed=1), ROWS, longest=48, seed=2)
    for part in (96, 384):
        traffic.run(part, steps.append)
        assert own.free_slots == ROWS + 1 and own.pools.carries == {}, "idle between two runs"
    assert len(steps) >= 480 and engine.stats.preemptions > 3 and traffic.admitted > 20
    assert {done.reason for done in traffic.served} >= {"length", "cancelled"}
    assert [done for done in traffic.served if not done.ends_well()] == []
    texts = longest((done.prompt, done.tokens) for done in traffic.served)
    assert len(texts) < len(traffic.served)
    verdict = judge(texts, session(conventional=True), own)
    assert verdict.wrong == [] and verdict.tokens == sum(len(tokens) for _, tokens in texts)


def open_cpu(model: Path) -> Session:
    """For processes; the model is always the same."""
    return session(conventional=True)


def own_texts(own: TorchSession) -> list[Text]:
    """Greedy, of eight tokens."""
    texts: list[Text] = []
    for prompt in prompts(3, 60, seed=4):
        slot, tokens = own.allocate(seed=1), []
        logits = own.prefill([PrefillChunk(slot, prompt, True)])[0]
        assert logits is not None
        for _ in range(8):
            tokens.append(int(logits.argmax()))
            [rows] = own.decode([DecodeRow(slot, tokens[-1:])])
            own.commit([1])
            logits = rows[0]
        own.free(slot)
        texts.append((prompt, tuple(tokens)))
    return texts


def with_second_choice(own: TorchSession, text: Text) -> Text:
    """At the fifth token."""
    prompt, tokens = text
    logits = next(forced(own, [text], 1))
    return prompt, (*tokens[:4], int(logits[4].argsort()[-2]), *tokens[5:])


def test_a_wrong_token_is_found_and_what_follows_it_is_judged_by_itself() -> None:
    own = session()
    texts = own_texts(own)
    assert judge(texts, session(conventional=True), own).wrong == []
    texts[1] = with_second_choice(own, texts[1])
    wrong = judge(texts, session(conventional=True), own).wrong
    assert wrong[0][0] == texts[1] and wrong[0][1] == 4


def test_processes_say_what_one_session_says() -> None:
    own = session()
    texts = own_texts(own)
    texts[1] = with_second_choice(own, texts[1])
    one = judge(texts, session(conventional=True), own)
    with CpuWorkers(open_cpu, Path(), 2, 1 + DRAFTS) as cpu:
        cpu.begin(texts[:2])
        wanted = list(cpu.logits(texts))
        assert verdict(texts, wanted, own) == one and len(one.wrong) > 0
    assert wanted[0] is None and wanted[2] is None and wanted[1] is not None, "a text of the CPU's choice needs none"


def test_texts_that_others_begin_with_are_left_out() -> None:
    texts = [((1,), (2, 3)), ((1,), (2, 3, 4)), ((1,), (2, 4)), ((2,), (2, 3)), ((1,), ()), ((1,), (2, 3))]
    assert longest(texts) == [((1,), (2, 3, 4)), ((1,), (2, 4)), ((2,), (2, 3))]
    assert longest([]) == longest([((1,), ())]) == []  # before the first request ends
