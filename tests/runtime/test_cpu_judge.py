"""The judge of long runs, and the traffic that it judges, on a CPU: what they let pass and what they find."""

from __future__ import annotations

import pytest

from tests.runtime.cpu_judge import Text, forced, judge, longest
from tests.runtime.steady_traffic import SteadyTraffic, prompts
from tests.runtime.torch_loops import DRAFTS, make_engine
from tests.session.sessions import open_session
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
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
    traffic.run(480, steps.append)
    assert len(steps) >= 480 and engine.stats.preemptions > 3 and traffic.admitted > 20
    assert own.free_slots == ROWS + 1
    assert {done.reason for done in traffic.served} >= {"length", "cancelled"}
    assert [done for done in traffic.served if not done.ends_well()] == []
    texts = longest((done.prompt, done.tokens) for done in traffic.served)
    assert len(texts) < len(traffic.served)
    verdict = judge(texts, session(conventional=True), own)
    assert verdict.wrong == [] and verdict.tokens == sum(len(tokens) for _, tokens in texts)


def test_a_wrong_token_is_found_and_what_follows_it_is_judged_by_itself() -> None:
    own = session()
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
    assert judge(texts, session(conventional=True), own).wrong == []
    prompt, tokens = texts[1]
    logits = next(forced(own, [(prompt, tokens)], 1))
    second = int(logits[4].argsort()[-2])
    texts[1] = (prompt, (*tokens[:4], second, *tokens[5:]))
    wrong = judge(texts, session(conventional=True), own).wrong
    assert wrong[0][0] == texts[1] and wrong[0][1] == 4


def test_texts_that_others_begin_with_are_left_out() -> None:
    texts = [((1,), (2, 3)), ((1,), (2, 3, 4)), ((1,), (2, 4)), ((2,), (2, 3)), ((1,), ()), ((1,), (2, 3))]
    assert longest(texts) == [((1,), (2, 3, 4)), ((1,), (2, 4)), ((2,), (2, 3))]
