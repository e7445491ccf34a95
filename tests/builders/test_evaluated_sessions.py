"""The networks that a build would compile, evaluated with torch, against the torch session on the same checkpoints.

Oracle O4: another implementation of whole models. Nothing of TensorRT runs here but its network definitions; its own
numerics are not tested by this file. Logits and recurrent states are compared, for prompts in chunks and in one piece,
mixed rows in any order, padding, rejected drafts and flushes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, trace_networks
from tests.paths import require_model
from tests.session.sessions import CHECKPOINTS, states
from tests.tolerance import FACTOR, LOGIT_NOISE, REPLAY_LOGIT_NOISE
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

TRAINED = ("nemotron-tiny", "nemotron-moe-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny")
SMALL = ("nemotron-dense", "nemotron-moe", "nemotron-moe-groups", "qwen-dense", "qwen-moe")
REPLAY = ReplayConfig(window=8, max_step_tokens=4)
OTHER_EXPERT = 0.2  # of the logits' RMS: what one other expert changed was up to 0.11
FLOAT32, BFLOAT16 = ActivationDtype.FLOAT32, ActivationDtype.BFLOAT16


def open_checkpoint(name: str) -> Checkpoint:
    return Checkpoint.open(require_model(name) if name in TRAINED else CHECKPOINTS / name)


def options(activation: ActivationDtype = FLOAT32, replay: ReplayConfig = REPLAY) -> BuildOptions:
    return BuildOptions(
        target="12.0", replay=replay, activation=activation, max_batch=4, max_seq_len=160, context_tokens=64
    )


def evaluated(checkpoint: Checkpoint, directory: Path, activation: ActivationDtype = FLOAT32) -> TensorRtSession:
    return evaluated_session(trace_networks(CheckpointParameters(checkpoint), options(activation)), directory)


def reference(checkpoint: Checkpoint, activation: ActivationDtype = FLOAT32) -> TorchSession:
    return TorchSession.from_checkpoint(checkpoint, REPLAY, PoolConfig(slots=4, max_seq_len=160, activation=activation))


def drive(session: TorchSession) -> Iterator[Logits]:
    """Prompts in one and in two chunks, then steps of 1..4 tokens in both orders of rows, some of them rejected."""
    rng = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return [int(t) for t in rng.integers(0, session.geometry.vocab, count)]

    unused, a, b = session.allocate(0), session.allocate(1), session.allocate(2)
    first, second = tokens(20), tokens(37)
    whole, part = session.prefill([PrefillChunk(a, first, True), PrefillChunk(b, second[:30], False)])
    assert whole is not None and part is None
    yield whole
    (rest,) = session.prefill([PrefillChunk(b, second[30:], True)])
    assert rest is not None
    yield rest
    for step in range(12):
        rows = [DecodeRow(a, tokens(1 + step % 4)), DecodeRow(-1, []), DecodeRow(b, tokens(1 + (step + 1) % 4))]
        order = rows[::-1] if step % 2 else rows
        yield from session.decode(order)
        session.commit([step % 3, 4, 1 + step % 2])
    session.free(unused)


def assert_close(
    ours: Iterable[Logits], theirs: Iterable[Logits], noise: tuple[float, float] = (LOGIT_NOISE, REPLAY_LOGIT_NOISE)
) -> None:
    """noise: of the median step and of the worst one, stated for logits of up to 8."""
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x.size]
    largest = max(1.0, max(float(np.abs(y).max()) for _, y in pairs) / 8)
    differences = [float(np.abs(x - y).max()) for x, y in pairs]
    assert np.median(differences) <= noise[0] * largest and max(differences) <= noise[1] * largest


@pytest.mark.parametrize("name", [*TRAINED, *SMALL])
def test_networks_and_native_operations_compute_what_the_torch_session_does(name: str, tmp_path: Path) -> None:
    with open_checkpoint(name) as checkpoint:
        ours, theirs = evaluated(checkpoint, tmp_path), reference(checkpoint)
        assert_close(drive(ours), drive(theirs))
    for slot in (1, 2):
        assert ours.cursors(slot) == theirs.cursors(slot)
        for x, y in zip(states(ours, slot), states(theirs, slot), strict=True):
            assert float((x - y).abs().max()) <= REPLAY_LOGIT_NOISE * float(y.abs().max())


@pytest.mark.parametrize("name", TRAINED)
def test_bfloat16_networks_lose_no_more_than_the_torch_session_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Oracle O3: the same formulas in plain torch at the same precision bound the error.

    A router whose leaders are nearer than the noise may choose another expert on another processor, in either session:
    of mixtures of experts the worst tenth of the tokens is held to `OTHER_EXPERT` instead.
    """
    with open_checkpoint(name) as checkpoint:
        exact = rows_of(drive(reference(checkpoint)))
        fair = rows_of(drive(reference(checkpoint, BFLOAT16)))
        ours = rows_of(drive(evaluated(checkpoint, tmp_path, BFLOAT16)))
    errors, bound = token_errors(ours, exact), token_errors(fair, exact)
    kept = len(errors) * 9 // 10 if "moe" in name else len(errors)
    assert rms(errors[:kept]) <= FACTOR * rms(bound[:kept])
    assert errors[-1] <= OTHER_EXPERT * rms(exact)


def rows_of(logits: Iterable[Logits]) -> Logits:
    return np.concatenate([np.atleast_2d(each) for each in logits if each.size])


def token_errors(ours: Logits, exact: Logits) -> Logits:
    """[tokens], RMS over the vocabulary, ascending."""
    return np.sort(np.sqrt(np.square(ours - exact).mean(-1)))


def rms(values: Logits) -> float:
    return float(np.sqrt(np.square(values).mean()))


@pytest.mark.parametrize("name", TRAINED)
def test_64_greedy_tokens_are_those_of_the_torch_session(name: str, tmp_path: Path) -> None:
    prompt = list(range(5, 29))
    texts = []
    with open_checkpoint(name) as checkpoint:
        for session in (evaluated(checkpoint, tmp_path), reference(checkpoint)):
            slot = session.allocate(7)
            (last,) = session.prefill([PrefillChunk(slot, prompt, True)])
            assert last is not None
            text = [int(last.argmax())]
            while len(text) < 64:
                (logits,) = session.decode([DecodeRow(slot, text[-1:])])
                session.commit([1])
                text.append(int(logits[0].argmax()))
            texts.append(text)
    assert texts[0] == texts[1]


def test_the_drafting_head_is_that_of_the_torch_session_and_keeps_the_greedy_text(tmp_path: Path) -> None:
    """Drafts of 3 tokens, verified in one step; the text must be the plain one, and some drafts must be accepted."""
    prompt = list(range(40, 62))
    with open_checkpoint("qwen3_5-tiny") as checkpoint:
        session, plain = evaluated(checkpoint, tmp_path), reference(checkpoint)
        twin = reference(checkpoint)
        slot, other = session.allocate(1), twin.allocate(1)
        (last,), (also,) = (s.prefill([PrefillChunk(n, prompt, True)]) for s, n in ((session, slot), (twin, other)))
        assert last is not None and also is not None
        text, accepted, following = [int(last.argmax())], 0, [*prompt[1:], int(last.argmax())]
        while len(text) < 40:
            drafts: list[int] = []
            for x, y in zip(_drafts(session, slot, following), _drafts(twin, other, following), strict=True):
                assert np.abs(x - y).max() <= REPLAY_LOGIT_NOISE
                drafts.append(int(y.argmax()))
            tokens = [text[-1], *drafts]
            (logits,), _ = session.decode([DecodeRow(slot, tokens)]), twin.decode([DecodeRow(other, tokens)])
            chosen = [int(row.argmax()) for row in logits]
            count = next((i for i, d in enumerate(drafts) if chosen[i] != d), len(drafts))
            session.commit([count + 1])
            twin.commit([count + 1])
            accepted += count
            following = [*drafts[:count], chosen[count]]
            text += following
        expected = _plain_text(plain, prompt, 40)
    assert accepted > 0
    assert text[:40] == expected


def _drafts(session: TorchSession, slot: int, following: list[int]) -> Iterator[Logits]:
    (logits,) = session.mtp_begin([MtpRow(slot, following)])
    yield logits
    for _ in range(2):
        (logits,) = session.mtp_next([int(logits.argmax())])
        yield logits


def _plain_text(session: TorchSession, prompt: list[int], count: int) -> list[int]:
    slot = session.allocate(1)
    (last,) = session.prefill([PrefillChunk(slot, prompt, True)])
    assert last is not None
    text = [int(last.argmax())]
    while len(text) < count:
        (logits,) = session.decode([DecodeRow(slot, text[-1:])])
        session.commit([1])
        text.append(int(logits[0].argmax()))
    return text


def test_garbage_in_a_freed_slot_does_not_reach_its_next_tenant(tmp_path: Path) -> None:
    """NaN in the caches of a slot, which a masked position would still spread, is gone when the slot is free."""
    with open_checkpoint("nemotron-dense") as checkpoint:
        session = evaluated(checkpoint, tmp_path)
        slot = session.allocate(1)
        for kv in session.pools.kv.values():
            kv.keys[slot] = kv.values[slot] = torch.nan
        session.free(slot)
        again = session.allocate(1)
        (last,) = session.prefill([PrefillChunk(again, [1, 2, 3], True)])
    assert again == slot and last is not None and np.isfinite(last).all()


def test_a_prompt_chunk_beyond_the_built_limit_is_refused(tmp_path: Path) -> None:
    with open_checkpoint("nemotron-dense") as checkpoint:
        session = evaluated(checkpoint, tmp_path)
        slot = session.allocate(1)
        with pytest.raises(ContractError, match="context_tokens that the bundle was built for"):
            session.prefill([PrefillChunk(slot, [1] * 65, True)])
