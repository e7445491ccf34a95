"""Where a request ends: end tokens, stop tokens, stop strings and length, also inside an accepted block of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.runtime.harness import PieceTokenizer, bench, scripted
from trtllm_replayssm.runtime.session.base import Logits

STOP = 12
WORDS = PieceTokenizer([f"w{i} ".encode() for i in range(64)])


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("kind", ["end_id", "stop_token_ids"])
def test_i01_stop_is_seen_before_the_length_that_a_later_accepted_token_reaches(drafts: bool, kind: str) -> None:
    script = [10, 11, STOP, 20, 21, 22]
    settings = {"end_id": STOP} if kind == "end_id" else {"stop_token_ids": [STOP]}
    output = scripted(script, drafts=drafts).one([1], max_tokens=5, **settings)
    assert (output.token_ids, output.finish_reason) == ([10, 11, STOP], "stop")
    assert output.stop_reason == (None if kind == "end_id" else STOP)


@pytest.mark.parametrize("drafts", [True, False])
def test_i01_stop_after_the_length_does_not_count(drafts: bool) -> None:
    script = [10, 11, 13, 20, 21, STOP]
    output = scripted(script, drafts=drafts).one([1], max_tokens=5, stop_token_ids=[STOP])
    assert (output.token_ids, output.finish_reason) == (script[:5], "length")


def test_i01_stop_and_length_at_the_same_token_is_a_stop() -> None:
    output = scripted([10, 11, STOP, 20]).one([1], max_tokens=3, end_id=STOP)
    assert (output.token_ids, output.finish_reason) == ([10, 11, STOP], "stop")


def test_i03_a_stop_string_followed_by_more_accepted_tokens_than_it_is_long_is_found() -> None:
    pieces = PieceTokenizer([b"a", b"#", *(bytes([98 + i % 24]) for i in range(62))])
    output = scripted([0, 0, 1, 0, 0, 0], tokenizer=pieces, draft_len=7).one([5], max_tokens=20, stop="#")
    assert (output.text, output.finish_reason, output.stop_reason) == ("aa", "stop", "#")
    assert output.token_ids == [0, 0, 1]


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("drafts", [True, False])
def test_i04_the_tokens_delivered_are_the_tokens_counted(at: int, drafts: bool) -> None:
    script = [10 + i for i in range(6)]
    machine = scripted(script, drafts=drafts)
    output = machine.one([1], max_tokens=6, end_id=script[at], logprobs=0)
    assert output.token_ids == script[: at + 1]
    assert output.length == at + 1 == len(output.logprobs or [])
    assert machine.engine.stats.output_tokens == at + 1
    assert sum(n * c for n, c in machine.engine.stats.acceptance.items()) == at  # the first came from the prompt


# Steps of 4 emit [10], [11 12 13 14], [15 16 17 18]: the end token first, in the middle, last, and as the bonus token
@pytest.mark.parametrize("end", [10, 11, 12, 13, 14, 15])
def test_i06_nothing_follows_an_accepted_end_token_and_its_slot_is_used_again_at_once(end: int) -> None:
    script = list(range(10, 30))
    machine = scripted(script, draft_len=3, drafts=True)
    first = machine.one([1], max_tokens=20, end_id=end)
    assert first.token_ids == list(range(10, end + 1)) and first.finish_reason == "stop"
    assert machine.session.free_slots == machine.session.pool.slots
    second = machine.one([2], max_tokens=20, end_id=-1)
    assert second.token_ids == script
    assert machine.session.owners == [0, 0]


def test_i06_a_request_that_ends_leaves_the_others_of_its_batch_alone() -> None:
    script = list(range(10, 30))
    machine = scripted(script, draft_len=3)
    short = machine.add([1], max_tokens=20, end_id=12)
    long = machine.add([2], max_tokens=20)
    done = machine.run()
    assert done[short].outputs[0].token_ids == [10, 11, 12]
    assert done[long].outputs[0].token_ids == script


def test_i06_a_request_may_end_on_the_step_that_flushes() -> None:
    machine = scripted(list(range(10, 40)), draft_len=3)  # window 8: the third step of 4 flushes
    output = machine.one([1], max_tokens=30, end_id=21)
    assert output.token_ids == list(range(10, 22))
    assert machine.session.flushes == machine.engine.stats.flushes == 1


@pytest.mark.parametrize("end", [2, 11])
@pytest.mark.parametrize("include", [True, False])
def test_i07_ids_and_logprobs_have_one_length_for_each_of_several_end_tokens(end: int, include: bool) -> None:
    script = [10, 12, end, 20, 21, 22]
    machine = scripted(script, eos_ids=(2, 11), tokenizer=WORDS)
    output = machine.one([1], max_tokens=6, logprobs=2, include_stop_str_in_output=include)
    assert output.token_ids == script[:3] and len(output.logprobs or []) == 3
    assert output.text == f"w10 w12 {f'w{end} ' if include else ''}"
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignore_eos_runs_to_the_length_and_stop_token_ids_still_stop() -> None:
    script = [10, 2, 11, 2, 13, 14]
    ignoring = scripted(script, eos_ids=(2,)).one([1], max_tokens=5, ignore_eos=True)
    assert (ignoring.token_ids, ignoring.finish_reason) == (script[:5], "length")
    stopping = scripted(script, eos_ids=(2,)).one([1], max_tokens=5, ignore_eos=True, stop_token_ids=[11])
    assert stopping.token_ids == [10, 2, 11]


@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_min_tokens_masks_end_tokens_at_every_position_of_a_draft(kind: str) -> None:
    def always_end(tokens: Sequence[int]) -> Logits:
        return np.array([9.0, 5.0, 1.0, 0.0], np.float32)

    for minimum in range(1, 8):
        machine = bench(kind, model=always_end, vocab=4)
        output = machine.one([3], max_tokens=10, min_tokens=minimum)
        assert output.token_ids == [1] * minimum + [0]


@pytest.mark.parametrize("minimum, expected", [(0, 3), (3, 3), (4, 6)])
def test_min_tokens_lets_an_early_stop_string_pass(minimum: int, expected: int) -> None:
    script = [10, 11, 12, 10, 11, 12, 10]
    output = scripted(script, tokenizer=WORDS).one([1], max_tokens=7, stop="w12", min_tokens=minimum)
    assert len(output.token_ids) == expected and output.finish_reason == "stop"
    assert output.text == "w10 w11 " if expected == 3 else "w10 w11 w12 w10 w11 "


@pytest.mark.parametrize("short_by", range(1, 8))
@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp"])
def test_i13_a_prompt_near_the_limit_ends_with_length_and_writes_nothing_past_it(short_by: int, kind: str) -> None:
    limit = 32  # the fake session refuses a write past it, drafts included
    machine = bench(kind, max_seq_len=limit, draft_len=5, window=8)
    prompt = [1 + i % 3 for i in range(limit - short_by)]
    output = machine.one(prompt, max_tokens=None, end_id=-1)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == short_by
    assert output.token_ids == bench(max_seq_len=limit).one(prompt, max_tokens=None, end_id=-1).token_ids


def test_i13_max_tokens_beyond_the_limit_is_cut_to_it() -> None:
    output = bench(max_seq_len=16).one([1] * 10, max_tokens=1000, end_id=-1)
    assert (len(output.token_ids), output.finish_reason) == (6, "length")


def test_i16_a_stop_string_split_over_tokens_is_found_and_nothing_of_it_is_shown() -> None:
    pieces = PieceTokenizer([b"alpha ", b"beta", b" gam", b"ma", b" delta", *[b"x"] * 59])
    machine = scripted([0, 1, 2, 3, 4, 4], tokenizer=pieces, drafts=False)
    number = machine.add([9], max_tokens=6, stop="beta gamma")
    shown = []
    while machine.engine.has_work:
        for request in machine.engine.step():
            shown.append(request.choices[0].output.text)
    assert shown == ["alpha "] * 4
    assert number == 0 and machine.session.free_slots == machine.session.pool.slots


def test_i16_text_held_back_for_a_stop_that_never_completes_is_shown_at_the_end() -> None:
    pieces = PieceTokenizer([b"alpha ", b"beta", b" gam", *[b"x"] * 61])
    output = scripted([0, 1, 2], tokenizer=pieces).one([9], max_tokens=3, stop="beta gamma")
    assert (output.text, output.finish_reason) == ("alpha beta gam", "length")


@pytest.mark.parametrize("include", [True, False])
def test_i16_of_two_stops_the_one_complete_first_ends_the_text(include: bool) -> None:
    pieces = PieceTokenizer([b"go ", b"beta", b" gamma", *[b"x"] * 61])
    output = scripted([0, 1, 2], tokenizer=pieces).one(
        [9], max_tokens=3, stop=["beta gamma", "beta"], include_stop_str_in_output=include
    )
    assert output.text == ("go beta" if include else "go ")
    assert (output.stop_reason, output.token_ids) == ("beta", [0, 1])
