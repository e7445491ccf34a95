"""Whole models on the CPU: with the device loop every request of random traffic gets the host path's tokens."""

from __future__ import annotations

import pytest

from tests.prefix.torch_engines import WITH_HEAD, session_of
from tests.runtime.torch_loops import assert_same, make_engine, run, traffic

CASES = [("nemotron-moe", "plain"), ("qwen-dense", "plain"), ("qwen-dense", "ngram"), (WITH_HEAD, "mtp")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_random_traffic_gets_the_tokens_of_the_host_s_path(name: str, kind: str) -> None:
    """Admissions, cancellations and preemptions, greedy and sampled; no slot is lost."""
    results = []
    for ahead in (False, True):
        session = session_of(name, slots=6, max_seq_len=96, formats="float32")
        engine = make_engine(session, kind, ahead=ahead, debug=True)
        results.append(run(engine, traffic(24, 60, seed=7, longest=20)))
        assert session.free_slots == 6 and engine.stats.preemptions > 0
    assert_same(results[1], results[0])
