"""Ten thousand steps of batches of up to 64 requests on a GPU: texts, foreign slots, memory, slots."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.native import harness
from tests.native.test_session import weights
from tests.paths import EXAMPLES
from tests.runtime.cpu_judge import Text, longest, verdict
from tests.runtime.cpu_workers import CpuWorkers
from tests.runtime.steady_traffic import SteadyTraffic, prompts
from tests.runtime.torch_loops import DRAFTS, bystander, make_engine
from trtllm_replayssm.config import CudaGraphConfig, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.planner import plan_memory
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = [
    pytest.mark.gpu, pytest.mark.slow,
    pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
]  # fmt: skip

ROWS = 64
STEPS = 10_000
LONGEST = 512  # new tokens of a request
CPU_WORKERS = 5  # processes that read texts; three runs share sixteen cores
TRAFFIC = [
    ("nemotron-tiny-nvfp4", "plain"), ("nemotron-tiny-nvfp4", "ngram"), ("qwen3_5-tiny-nvfp4", "plain"),
    ("qwen3_5-tiny-nvfp4", "ngram"), ("qwen3_5-tiny-nvfp4", "mtp"), ("qwen3_5-tiny-nvfp4", "mtp-sampled"),
]  # fmt: skip


def open_session(model: Path, device: str) -> TorchSession:
    """65 slots; on a GPU steps are recorded."""
    pool = PoolConfig(slots=ROWS + 1, max_seq_len=560, activation=ActivationDtype.BFLOAT16)
    with Checkpoint.open(model) as checkpoint:
        geometry = checkpoint.geometry
    replay = ReplayConfig(window=16, max_step_tokens=1 + DRAFTS)
    pools = StatePools.allocate(geometry, replay, pool, conventional=False, device=torch.device(device))
    graphs = CudaGraphConfig() if device == "cuda" else None
    return TorchSession(weights(model, device, ActivationDtype.BFLOAT16), pools, cuda_graphs=graphs)


def open_cpu(model: Path) -> TorchSession:
    """The judge's."""
    return open_session(model, "cpu")


@pytest.mark.parametrize(("name", "kind"), TRAFFIC)
def test_ten_thousand_steps_give_the_cpu_s_text_touch_no_other_slot_and_need_no_more_memory(
    name: str, kind: str
) -> None:
    with CpuWorkers(open_cpu, EXAMPLES / name, CPU_WORKERS, 1 + DRAFTS) as cpu:
        run_and_judge(name, kind, cpu)


def device_bytes() -> tuple[int, int]:
    """Allocated and reserved now."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def planned_bytes(engine: Engine) -> int:
    """What the memory plan of this engine leaves for passes over prompts."""
    session, config = engine.session, engine.config
    plan = plan_memory(
        session.geometry, session.replay, session.pool, memory=0, weights=0, prompt_tokens=config.max_num_tokens,
        prompts=config.max_unfinished,
    )  # fmt: skip
    return plan.prompt + plan.carries(config.max_batch_size)


def run_and_judge(name: str, kind: str, cpu: CpuWorkers) -> None:
    """The test; the CPU reads texts while others are still made."""
    session = open_session(EXAMPLES / name, "cuda")
    slot, held = bystander(session)
    engine = make_engine(session, kind, ahead=True)
    engine.warm_up()
    recorded, memory = session.graphs.count, [device_bytes()]

    def after(step: int) -> None:
        if step % 250 == 0:  # what writes there by mistake is never undone: this only says when it was
            assert session.pools.slot_hash(slot) == held
        if step % 1000 == 0:
            cpu.begin(texts())

    def texts() -> list[Text]:
        return longest((done.prompt, done.tokens) for done in traffic.served)

    traffic = SteadyTraffic(engine, prompts(12, 4000, seed=7), ROWS, longest=LONGEST, seed=11)
    for steps in (STEPS // 5, STEPS - STEPS // 5):  # each time to the end of the last request
        traffic.run(steps, after)
        memory.append(device_bytes())
    assert session.pools.slot_hash(slot) == held
    assert session.graphs.count == recorded > 0
    assert session.free_slots == session.pool.slots - 1
    assert engine.stats.preemptions > 500 and traffic.admitted > 1_000
    assert [done for done in traffic.served if not done.ends_well()] == []
    whole = texts()
    assert max(len(tokens) for _, tokens in whole) > LONGEST * 9 // 10
    planned = planned_bytes(engine)
    judged = verdict(whole, cpu.logits(whole), open_session(EXAMPLES / name, "cuda"))
    warm, early, end = memory
    report = (
        f"{name} {kind}: {traffic.admitted} requests, {len(whole)} texts, {judged.tokens} tokens, {judged.undecided} "
        f"undecided, {len(judged.wrong)} wrong; bytes allocated and reserved: warm {warm}, idle after a fifth {early}, "
        f"at the end {end}, {planned} planned for prompts; {engine.stats}"
    )
    print(report)
    assert judged.wrong == [], report
    assert judged.undecided <= judged.tokens // 20, report
    assert end[0] == early[0], report
    assert end[1] - warm[1] <= planned, report
