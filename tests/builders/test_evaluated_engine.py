"""The scheduler, both drafters and a session of evaluated networks: the texts are those of the torch session.

More requests than slots, prompts in chunks, stops at different lengths: rows come and go, so that slots and rows of a
step never stay the same, which is where a session whose caches are bound by row could go wrong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, trace_networks
from tests.builders.test_evaluated_sessions import options, reference
from tests.paths import require_model
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.outputs import request_output
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.speculative.drafter import Drafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.step import SessionHead
from trtllm_replayssm.weights.checkpoint import Checkpoint

REQUESTS = 10


def texts(session: TorchSession, kind: str) -> list[list[int]]:
    """What every request gets, greedily, in the order of the requests."""
    drafters: dict[str, Drafter | None] = {
        "plain": None, "ngram": NGramDrafter(3, 3), "mtp": MtpDrafter(SessionHead(session), 3),
    }  # fmt: skip
    config = EngineConfig(max_batch_size=4, max_num_tokens=64, prefill_chunk=16)
    engine = Engine(session, drafters[kind], None, config)
    rng = np.random.default_rng(1)
    order, done = [], {}
    for number in range(REQUESTS):
        piece = [int(t) for t in rng.integers(0, session.geometry.vocab, 4)]
        prompt = (piece * 12)[: int(rng.integers(1, 45))]  # repeats: n-grams match
        settings = SamplingParams(max_tokens=3 + 3 * (number % 5), end_id=-1, temperature=0.0)
        order.append(engine.add_request(prompt, settings, priority=0.5))
        for _ in range(number % 3):  # some arrive while others run
            done.update({r.request_id: request_output(r) for r in engine.step() if r.finished})
    while engine.has_work:
        done.update({r.request_id: request_output(r) for r in engine.step() if r.finished})
    assert session.free_slots == session.pool.slots
    return [list(done[number].outputs[0].token_ids) for number in order]


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp"])
def test_an_engine_writes_the_same_texts(kind: str, tmp_path: Path) -> None:
    with Checkpoint.open(require_model("qwen3_5-tiny")) as checkpoint:
        ours = texts(evaluated_session(trace_networks(CheckpointParameters(checkpoint), options()), tmp_path), kind)
        assert ours == texts(reference(checkpoint), kind)
    assert [len(text) for text in ours] == [3 + 3 * (n % 5) for n in range(REQUESTS)]
