"""Two ranks on a CPU: with the device loop, every request of random traffic gets the host path's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import EXAMPLES, ROOT
from tests.prefix.torch_engines import WITH_HEAD
from tests.runtime.fake_session import FakeSession, hash_model
from tests.runtime.torch_loops import assert_same, make_engine, run, traffic
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.runtime.ahead import steps_ahead
from trtllm_replayssm.runtime.checkpoint_session import checkpoint_session
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.shared_steps import SharedSteps
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(300)
QWEN = ROOT / "tests" / "checkpoints" / "qwen-dense"


def shared(directory: Path) -> Session:
    pool = PoolConfig(slots=5, max_seq_len=96, activation=ActivationDtype.FLOAT32)
    return checkpoint_session(
        Checkpoint.open(directory), ReplayConfig(window=8, max_step_tokens=4), pool, state_cache="replay",
        device="cpu", cuda_graphs=None, debug=False, ranks=2,
    )  # fmt: skip


@pytest.mark.parametrize(("directory", "kind"), [(QWEN, "ngram"), (EXAMPLES / WITH_HEAD, "mtp-sampled")])
def test_random_traffic_gets_the_tokens_of_the_host_s_path(directory: Path, kind: str) -> None:
    session = shared(directory)
    results = []
    for ahead in (False, True):
        engine = make_engine(session, kind, ahead=ahead)  # type: ignore[arg-type]
        assert isinstance(engine._steps, SharedSteps if ahead else type(None))
        results.append(run(engine, traffic(8, 60, seed=7, longest=20)))
        assert session.free_slots == 5 and engine.stats.output_tokens > 0
    session.check_integrity()
    session.close()
    assert_same(results[1], results[0])


def test_a_session_of_another_kind_has_no_loop() -> None:
    other = FakeSession(hash_model(8), slots=1)
    assert steps_ahead(other, None, wanted=None, keeps_ends=False) is None
    with pytest.raises(UnsupportedError, match="device_loop: expected false or nothing, got true with a session of"):
        steps_ahead(other, None, wanted=True, keeps_ends=False)


def test_the_llm_loops_on_the_devices_of_all_ranks_where_it_is_told_to() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    texts = []
    for ranks, device_loop in ((1, False), (2, True), (2, None)):
        with LLM(
            QWEN, tensor_parallel_size=ranks, device_loop=device_loop, max_batch_size=2, max_seq_len=64
        ) as llm:  # fmt: skip
            texts.append([list(o.outputs[0].token_ids) for o in llm.generate([[1, 2, 3], [4, 5]], params)])
    assert texts[0] == texts[1] == texts[2] and len(texts[0][0]) == 12
