"""Requests in files: another engine goes on as if nothing had happened; damaged and foreign files are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, PieceTokenizer, bench, noisy
from trtllm_replayssm.errors import CheckpointError, EngineMismatchError, RequestError, UnsupportedError
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.transfer import container

MODEL = hash_model(VOCAB, sharpness=2.0)
HEAD = noisy(MODEL, hash_model(VOCAB, salt=9), every=3)
PIECES = PieceTokenizer([b"", *(bytes([64 + i]) for i in range(1, VOCAB))])
SETTINGS: dict[str, Any] = {
    "max_tokens": 18, "end_id": -1, "temperature": 0.9, "seed": 11, "logprobs": 2, "stop": "never mind",
    "presence_penalty": 0.3, "logit_bias": {3: 0.5}, "stop_token_ids": [0], "min_tokens": 2,
}  # fmt: skip


def machine(kind: str = "plain", **settings: Any) -> Bench:
    return bench(kind, model=MODEL, head_model=HEAD, chunk=3, tokenizer=PIECES, **settings)


def answers(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (o.token_ids, o.text, o.logprobs, o.cumulative_logprob, o.finish_reason, o.stop_reason) for o in output.outputs
    ]


HOWS: dict[str, Callable[[Bench, int], object]] = {
    "as it runs": lambda source, number: None,
    "preempted": lambda source, number: source.engine.preempt(number),
    "partly preempted": lambda source, number: source.engine._to_host(source.engine._requests[number].choices[-1]),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    ("n", "how"), [(1, "as it runs"), (2, "as it runs"), (1, "preempted"), (3, "partly preempted")]
)
def test_b17_a_request_goes_on_in_another_engine_from_every_step_on(
    kind: str, n: int, how: str, tmp_path: Path
) -> None:
    prompt, settings = [1, 2, 3, 4, 5, 6, 7], {**SETTINGS, "n": n}
    first = machine(kind)
    whole = first.add(prompt, **settings)
    want = answers(first.run()[whole])
    for when in range(30):
        source = machine(kind)
        number = source.add(prompt, **settings)
        for _ in range(when):
            source.step()
        if not source.engine.has_work:
            assert when > 5
            break
        HOWS[how](source, number)
        path = tmp_path / f"{when}.request"
        source.engine.export_request(number, path)
        target = machine(kind)
        target.add([9], max_tokens=30, end_id=-1)  # other numbers, other slots
        target.step()
        there = target.engine.import_request(path)
        assert there != number and answers(target.run()[there]) == want
        assert answers(source.run()[number]) == want  # and it goes on where it was


def test_a_preempted_and_a_waiting_request_are_exported_as_they_are(tmp_path: Path) -> None:
    source = machine(slots=1)
    first, second = source.add([1, 2], **SETTINGS), source.add([3, 4], **SETTINGS)
    for _ in range(4):
        source.step()
    source.engine.preempt(first)
    for number in (first, second):
        source.engine.export_request(number, tmp_path / str(number))
    target = machine(slots=1)
    numbers = [target.engine.import_request(tmp_path / str(number)) for number in (first, second)]
    done, wanted = target.run(), source.run()
    assert [answers(done[n]) for n in numbers] == [answers(wanted[n]) for n in (first, second)]
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_a_choice_that_had_ended_stays_ended(tmp_path: Path) -> None:
    settings = {**SETTINGS, "n": 3, "temperature": 2.0, "stop_token_ids": list(range(0, VOCAB, 5)), "min_tokens": None}
    source = machine()
    number = source.add([5, 6], **settings)
    while sum(o is not None for o in (c.output.finish_reason for c in source.engine._requests[number].choices)) < 1:
        source.step()
    source.engine.export_request(number, tmp_path / "r")
    target = machine()
    there = target.engine.import_request(tmp_path / "r")
    assert answers(target.run()[there]) == answers(source.run()[number])


def test_a_file_of_many_empty_tensors_is_whole_however_they_are_listed(tmp_path: Path) -> None:
    """As of a sequence without tokens: tensors that share an offset have no order by it."""
    path = tmp_path / "empty.request"
    arrays = {f"kv {i}": ("float32", (0, i), b"") for i in range(24)} | {"cursors": ("int32", (1,), bytes(4))}
    container.write(path, {"tokens": []}, arrays)
    for _ in range(40):
        found = container.read(path)
        assert dict(found.arrays) == arrays and list(found.arrays) == list(arrays)


def test_a_priority_comes_along_and_holds(tmp_path: Path) -> None:
    source = machine()
    source.engine.export_request(source.add([1], priority=0.9, **SETTINGS), tmp_path / "r")
    target = machine(slots=1)
    target.add([2], max_tokens=30, end_id=-1)
    target.step()
    there = target.engine.import_request(tmp_path / "r")
    target.step()
    assert [c.request.request_id for c in target.engine._scheduler.resident] == [there]
    target.run()


def exported(tmp_path: Path, **settings: Any) -> Path:
    source = machine()
    number = source.add([1, 2, 3, 4, 5], **{**SETTINGS, **settings})
    for _ in range(5):
        source.step()
    source.engine.export_request(number, tmp_path / "r")
    return tmp_path / "r"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The same file with another document."""
    found = container.read(path)
    document = json.loads(json.dumps(dict(found.document)))
    change(document)
    container.write(path, document, found.arrays)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "not ours": lambda p: p.write_bytes((2).to_bytes(8, "little") + b"{}"),
    "header": lambda p: p.write_bytes(p.read_bytes().replace(b'"document"', b'"docoment"')),
    "no prompt": lambda p: rewrite(p, lambda d: d["request"].pop("prompt_ids")),
    "no choices": lambda p: rewrite(p, lambda d: d["request"]["choices"].clear()),
    "bad setting": lambda p: rewrite(p, lambda d: d["request"]["params"].update(n=0)),
    "unknown setting": lambda p: rewrite(p, lambda d: d["request"]["params"].update(best_of=2)),
    "misaligned": lambda p: rewrite(p, lambda d: d["request"]["choices"][0].update(prefilled=4)),
    "other position": lambda p: rewrite(p, lambda d: d["request"]["choices"][0].update(position=2)),
    "not a document": lambda p: rewrite(p, lambda d: d.update(request=[])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_and_nothing_is_queued(damage: str, tmp_path: Path) -> None:
    """B17: also states that do not lie where the tokens say."""
    path = exported(tmp_path)
    DAMAGE[damage](path)
    target = machine()
    with pytest.raises(CheckpointError, match="import_request"):
        target.engine.import_request(path)
    assert not target.engine.has_work and not target.engine._requests and target.session.free_slots == 4


def test_another_version_model_or_limit_is_refused_with_both_sides(tmp_path: Path) -> None:
    path = exported(tmp_path)
    for other in (machine(window=4), machine(max_seq_len=12)):
        with pytest.raises(EngineMismatchError, match="import_request"):
            other.engine.import_request(path)
        assert not other.engine.has_work
    path.write_bytes(path.read_bytes().replace(b'"version": "2"', b'"version": "1"'))
    with pytest.raises(EngineMismatchError, match="expected version 2, got 1"):
        machine().engine.import_request(path)
    wide = exported(tmp_path, n=4)
    with pytest.raises(EngineMismatchError, match=r"3 choices, got .* 4 choices"):
        machine(slots=3).engine.import_request(wide)


def test_stop_strings_need_a_tokenizer_where_the_request_goes_on(tmp_path: Path) -> None:
    path = exported(tmp_path)
    with pytest.raises(RequestError, match="stop: expected stop_token_ids"):
        bench(model=MODEL, chunk=3).engine.import_request(path)


def test_a_request_that_is_unknown_or_follows_a_grammar_is_not_exported(tmp_path: Path) -> None:
    class Anything:
        def fork(self) -> Anything:
            return self

        def accept(self, token: int) -> None: ...

        def allowed(self, drafted: object) -> None:
            return None

    source = machine()
    with pytest.raises(RequestError, match="export_request: request_id"):
        source.engine.export_request(7, tmp_path / "r")
    number = source.add([1], max_tokens=5, logits_mask=Anything())
    with pytest.raises(UnsupportedError, match="logits_mask"):
        source.engine.export_request(number, tmp_path / "r")
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported(tmp_path)
    before = path.read_bytes()

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        exported(tmp_path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["r"]
