"""Edited and damaged request files: each is refused, or its request ends and nobody else notices."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.runtime.harness import VOCAB, Bench
from tests.runtime.test_transfer import SETTINGS, machine
from trtllm_replayssm.errors import CheckpointError, EngineMismatchError
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig
from trtllm_replayssm.runtime.transfer import container

PROMPT = [1, 2, 3, 4, 5, 6, 7]
OTHER = [9, 8, 7, 6]
# kind of drafter, choices, steps before the export: waiting, in the prompt, decoding with and without drafts
STAGES = [
    ("plain", 1, 0), ("plain", 2, 2), ("mtp", 1, 2), ("plain", 1, 8), ("plain", 2, 5), ("ngram", 1, 9), ("mtp", 2, 6),
    ("mtp-sampled", 1, 6), ("mtp-sampled", 3, 8),
]  # fmt: skip
Path_ = tuple[str | int, ...]


@cache
def original(stage: int) -> container.Container:
    kind, n, steps = STAGES[stage]
    source = machine(kind)
    number = source.add(PROMPT, **{**SETTINGS, "n": n})
    for _ in range(steps):
        source.step()
    with tempfile.TemporaryDirectory() as folder:
        source.engine.export_request(number, Path(folder) / "r")
        return container.read(Path(folder) / "r")


@cache
def alone(kind: str) -> list[int]:
    return machine(kind).one(OTHER, max_tokens=25, end_id=-1).token_ids


def check(kind: str, content: container.Container) -> str:
    """Import into an engine where something else runs -> how it went."""
    target = machine(kind, prefix=PrefixConfig(block=2, budget=1 << 20, outputs=True))
    other = target.add(OTHER, max_tokens=25, end_id=-1)
    for _ in range(3):
        target.step()
    outcome = "ended"
    with tempfile.TemporaryDirectory() as folder:
        container.write(Path(folder) / "r", content.document, content.arrays)
        try:
            number: int | None = target.engine.import_request(Path(folder) / "r")
        except (CheckpointError, EngineMismatchError) as error:
            assert str(error).startswith("import_request: ") and ": expected " in str(error)
            outcome, number = "refused", None
            assert len(target.engine._requests) == 1 and not target.engine._snapshots
    finish(target)
    assert target.done[other].outputs[0].token_ids == alone(kind)
    if number is not None:
        assert target.done[number].finished
        assert target.one(PROMPT, **SETTINGS).token_ids == fresh(kind)  # what was imported serves nobody else
    return outcome


@cache
def fresh(kind: str) -> list[int]:
    return machine(kind).one(PROMPT, **SETTINGS).token_ids


def finish(target: Bench) -> None:
    target.run(300)
    target.engine.check_integrity()
    assert target.session.free_slots == 4 and not target.engine._requests and not target.engine._snapshots


def places(value: Any, at: Path_ = ()) -> list[Path_]:
    """Every place in a JSON value."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in below for place in places(item, (*at, key)))]


def edited(document: Any, at: Path_, change: Callable[[Any], Any]) -> Any:
    """A copy with another value in one place."""
    if not at:
        return change(copy.deepcopy(document))
    result = copy.deepcopy(document)
    holder = result
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = change(holder[at[-1]])
    return result


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, False, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 18, 23, 24, 63, 64, 1 << 31, 1 << 63, 1 << 64, 10**30,
        0.5, -0.5, 1.5, 1e308, float("nan"), float("inf"), float("-inf"), "", "stop", "length", "cancelled", "error",
        "x", "\ud800", [], {}, [[]], [0], [3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [[3, 0.5]], [[1, -0.5, 1]], ["a"],
    ]
)  # fmt: skip
CHANGES = st.one_of(
    VALUES.map(lambda value: lambda old: value),
    st.integers(-3, 3).map(lambda by: lambda old: old + by if type(old) in (int, float) else [old]),
    st.just(lambda old: old[:-1] if isinstance(old, list) else None),
    st.just(lambda old: [*old, *old[-1:]] if isinstance(old, list) else {}),
    st.just(lambda old: old[::-1] if isinstance(old, list) else -1),
    st.just(lambda old: {**old, "more": 1} if isinstance(old, dict) else "0"),
    st.just(lambda old: dict(list(old.items())[:-1]) if isinstance(old, dict) else 1e400),
)


@pytest.mark.parametrize("stage", range(len(STAGES)), ids=["-".join(map(str, s)) for s in STAGES])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_an_edited_document_is_refused_or_its_request_ends(stage: int, data: st.DataObject) -> None:
    content = original(stage)
    document = json.loads(json.dumps(content.document))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(places(document)))
        document = edited(document, at, data.draw(CHANGES))
        if not isinstance(document, (dict, list)):
            break
    check(STAGES[stage][0], container.Container(document, content.arrays))


def choice(**fields: Any) -> Callable[[Any], Any]:
    return lambda d: d["request"]["choices"][0].update(fields)


def request(**fields: Any) -> Callable[[Any], Any]:
    return lambda d: d["request"].update(fields)


def params(**fields: Any) -> Callable[[Any], Any]:
    return lambda d: d["request"]["params"].update(fields)


def scores(document: Any) -> Any:
    return document["request"]["choices"][0]["logprobs"][0]


NAN = float("nan")
# (stage, what is changed, the place that the error names)
EDITS: dict[str, tuple[int, Callable[[Any], Any], str]] = {
    "draft id beyond the vocabulary": (5, choice(draft=[VOCAB]), "draft[0]"),
    "draft id that is no integer": (5, choice(draft=[1.0]), "draft[0]"),
    "drafts beyond the draft length": (5, choice(draft=[1] * 4), "draft"),
    "drafts beyond the limit": (5, choice(draft=[1] * 60), "draft"),
    "drafts of a waiting choice": (0, choice(draft=[1]), "draft"),
    "prompt id beyond the vocabulary": (3, lambda d: d["request"]["prompt_ids"].append(99), "prompt_ids[7]"),
    "no prompt": (0, request(prompt_ids=[]), "request"),
    "longer prompt than absorbed": (3, lambda d: d["request"]["prompt_ids"].append(1), "choices[0]"),
    "prompt in progress made complete": (1, lambda d: d["request"].update(prompt_ids=[1, 2, 3]), "choices[0]"),
    "prefilled beyond the prompt": (3, choice(prefilled=8), "prefilled"),
    "negative prefilled": (0, choice(prefilled=-1), "prefilled"),
    "position of another": (3, choice(position=3), "choices[0]"),
    "no position": (3, choice(position=None), "choices[0]"),
    "one of two positions missing": (4, lambda d: d["request"]["choices"][1].update(position=None), "choices[1]"),
    "limit beyond max_tokens": (3, request(limit=19), "limit"),
    "limit below what was emitted": (3, request(limit=2), "token_ids"),
    "limit of nothing": (0, request(limit=0), "limit"),
    "seed of another": (3, request(seed=12), "seed"),
    "seed beyond 64 bits": (3, lambda d: (params(seed=None)(d), request(seed=1 << 64)(d)), "seed"),
    "pending that is no number": (3, choice(pending=NAN), "pending"),
    "pending beyond the window": (3, choice(pending=9), "pending"),
    "cuts that fall": (1, choice(cuts=[4, 2]), "cuts"),
    "cuts beyond the prompt": (1, choice(cuts=[7]), "cuts[0]"),
    "bias beyond the vocabulary": (3, params(logit_bias=[[VOCAB, 1.0]]), "logit_bias[0][0]"),
    "bias that is no number": (3, params(logit_bias=[[1, NAN]]), "logit_bias[0][1]"),
    "bias beyond all bounds": (3, params(logit_bias=[[1, 1e308]]), "logit_bias[0][1]"),
    "priority that is no number": (3, request(priority=NAN), "priority"),
    "priority in words": (3, request(priority="high"), "priority"),
    "flag in words": (3, params(ignore_eos="yes"), "ignore_eos"),
    "n without its choices": (3, params(n=2), "choices"),
    "truncated to less than it has": (3, params(truncate_prompt_tokens=2), "params"),
    "all choices ended": (0, choice(error="x", finish_reason="error"), "choices[0]"),
    "cancelled": (3, choice(finish_reason="cancelled"), "finish_reason"),
    "a stop token before the last": (3, lambda d: d["request"]["choices"][0]["token_ids"].insert(1, 0), "logprobs"),
    "scores of other tokens": (3, lambda d: d["request"]["choices"][0]["logprobs"].reverse(), "logprobs"),
    "score beyond all numbers": (3, lambda d: scores(d)[0].__setitem__(1, -(10**400)), "logprobs[0][0][1]"),
    "cached more than absorbed": (0, request(cached_tokens=1), "cached_tokens"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_no_request_can_be_is_refused_and_named(name: str) -> None:
    stage, change, named = EDITS[name]
    content = original(stage)
    document = json.loads(json.dumps(content.document))
    change(document)
    with tempfile.TemporaryDirectory() as folder:
        container.write(Path(folder) / "r", document, content.arrays)
        with pytest.raises(CheckpointError if "draft length" not in name else EngineMismatchError) as caught:
            machine(STAGES[stage][0]).engine.import_request(Path(folder) / "r")
    assert named in caught.value.argument
    assert check(STAGES[stage][0], container.Container(document, content.arrays)) == "refused"


def q_of(rows: Callable[[Any], Any]) -> container.Container:
    """A request with sampled drafts and other distributions."""
    content = original(7)
    kind, shape, data = content.arrays["draft 0"]
    changed = np.ascontiguousarray(rows(np.frombuffer(data).reshape(shape).copy()), np.float64)
    arrays = {**content.arrays, "draft 0": (kind, changed.shape, changed.tobytes())}
    return container.Container(content.document, arrays)


ROWS: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda q: q * NAN, "infinite": lambda q: q + np.inf, "negative": lambda q: q - 1,
    "all zero": lambda q: q * 0, "unnormalised": lambda q: q * 2, "too few": lambda q: q[:-1],
    "too narrow": lambda q: q[:, :-1], "another shape": lambda q: q.reshape(-1),
    "one-hot elsewhere": lambda q: np.eye(VOCAB)[(q.argmin(axis=1))],
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_draft_distributions_that_nothing_was_drawn_from_are_refused(name: str) -> None:
    assert len(original(7).document["request"]["choices"][0]["draft"]) > 1
    assert check("mtp-sampled", q_of(lambda q: q)) == "ended"
    assert check("mtp-sampled", q_of(ROWS[name])) == "refused"


@pytest.mark.parametrize("steps", [1, 6], ids=["in the prompt", "decoding"])
def test_a_state_under_other_tokens_than_its_own_is_never_found_by_their_prefix(steps: int) -> None:
    """The one thing that cannot be checked: so nothing that came from a file is offered to the prefix cache."""
    source, target = machine(), machine(prefix=PrefixConfig(block=3, budget=1 << 20, outputs=True))
    number = source.add(PROMPT, **SETTINGS)
    for _ in range(steps):
        source.step()
    with tempfile.TemporaryDirectory() as folder:
        source.engine.export_request(number, Path(folder) / "r")
        found = container.read(Path(folder) / "r")
        found.document["request"]["prompt_ids"][0] = 9
        container.write(Path(folder) / "r", found.document, found.arrays)
        number = target.engine.import_request(Path(folder) / "r")
    output = target.run()[number].outputs[0]
    again = [9, *PROMPT[1:], *output.token_ids, 5]
    assert target.one(again, **SETTINGS).token_ids == machine().one(again, **SETTINGS).token_ids
    assert target.engine.stats.prefix.hits == 0
    own = [*again, 6]
    assert target.one(own, **SETTINGS).token_ids == machine().one(own, **SETTINGS).token_ids
    assert target.engine.stats.prefix.hits == 1  # what it ran itself is


def test_arrays_of_choices_that_have_no_state_are_refused() -> None:
    content = original(3)
    for name in ("choice 1/tokens", "draft 1", "other"):
        stray = {**content.arrays, name: ("int64", (1,), bytes(8))}
        assert check("plain", container.Container(content.document, stray)) == "refused"


@pytest.mark.parametrize("name", ["choice 0/other", "choice 1/tokens", "draft 0", "other"])
def test_an_empty_array_of_sizes_beyond_all_memory_is_refused(name: str) -> None:
    content = original(3)
    stray = {**content.arrays, name: ("float32", (0, 1 << 62, 1 << 62), b"")}
    with tempfile.TemporaryDirectory() as folder:
        container.write(Path(folder) / "r", content.document, stray)
        with pytest.raises(CheckpointError, match="of sizes"):
            container.read(Path(folder) / "r")


def test_what_is_no_regular_file_is_refused_before_it_is_opened() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(Path(folder) / "r")
        opened = os.open(Path(folder) / "r", os.O_RDWR)  # with a writer, an open would go on and a read would wait
        try:
            with mock.patch.object(container, "safe_open", side_effect=AssertionError("opened")):
                for path in (Path(folder) / "r", Path(folder)):
                    with pytest.raises(CheckpointError, match="no regular file"):
                        machine().engine.import_request(path)
        finally:
            os.close(opened)


@settings(max_examples=60, deadline=None)
@example(position=0.0, flip=1)
@example(position=1.0, flip=1)
@given(position=st.floats(0, 1), flip=st.integers(1, 255))
def test_a_flipped_bit_anywhere_is_found(position: float, flip: int) -> None:
    content = original(7)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r"
        container.write(path, content.document, content.arrays)
        data = bytearray(path.read_bytes())
        data[min(int(position * len(data)), len(data) - 1)] ^= flip
        path.write_bytes(data)
        try:
            found = container.read(path)
        except (CheckpointError, EngineMismatchError):
            return
        assert (found.document, found.arrays) == (content.document, content.arrays)  # only padding or spelling differs
