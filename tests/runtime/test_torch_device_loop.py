"""Whole models on the CPU: with the device loop every request of random traffic gets the host path's tokens."""

from __future__ import annotations

import pytest

from tests.prefix.torch_engines import WITH_HEAD, session_of
from tests.runtime.torch_loops import assert_same, bystander, make_engine, run, traffic

CASES = [
    ("nemotron-moe", "plain", "float32"),
    ("qwen-dense", "plain", "float16-nvfp4"),
    ("qwen-dense", "ngram", "fp8"),
    (WITH_HEAD, "mtp", "float32"),
]


@pytest.mark.parametrize(("name", "kind", "formats"), CASES)
def test_random_traffic_gets_the_tokens_of_the_host_s_path(name: str, kind: str, formats: str) -> None:
    """Admissions, cancellations and preemptions, greedy and sampled; no slot is lost, no other slot is touched."""
    results = []
    for ahead in (False, True):
        session = session_of(name, slots=7, max_seq_len=96, formats=formats)
        slot, held = bystander(session)
        engine = make_engine(session, kind, ahead=ahead, debug=True)
        results.append(run(engine, traffic(16, 60, seed=7, longest=20)))
        assert session.pools.slot_hash(slot) == held
        assert session.free_slots == 6 and engine.stats.preemptions > 0
    assert_same(results[1], results[0])
