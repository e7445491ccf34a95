"""Times a whole decode step of a preset with random weights over as many GPUs as torchrun starts processes for.

    torchrun --nproc-per-node 1 benchmarks/tensor_parallel_step.py qwen3.5-4b --json one.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel_step.py qwen3.5-4b --json two.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel_step.py qwen3.5-4b --nccl --json two_nccl.jsonl

One JSON line a batch size: microseconds a step (median and quartiles), GPUs, what adds up over them, machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from trtllm_replayssm.bench.machine import describe
from trtllm_replayssm.bench.step.cases import REPLAY, Schedule, StepCase
from trtllm_replayssm.bench.step.loop import StepLoop, fill_caches
from trtllm_replayssm.bench.step.measure import time_steps
from trtllm_replayssm.bench.step.model import StepModel, step_model
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.session.device import usable_device
from trtllm_replayssm.runtime.session.ranks import ProcessRanks
from trtllm_replayssm.weights.tensor_parallel import TensorParallel
from trtllm_replayssm.whole_file import growing_file


class NcclRanks(ProcessRanks):
    """Ranks that add up through NCCL alone."""

    def inboxes(self, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Ranks.inboxes`: none."""


def measure(model: StepModel, schedule: Schedule, batch: int, context: int) -> dict[str, Any]:
    """A plain step of `batch` rows: median and quartiles in microseconds."""
    torch.manual_seed(batch)  # all ranks take the same tokens
    case = StepCase(cache=REPLAY, replay=ReplayConfig(), rows=batch, tokens=1, accepted=1.0, context=context)
    session = model.session(case, batch, schedule.last_position(case))
    for slot in range(batch):
        session.allocate(slot)
    fill_caches(session)
    loop = StepLoop(session, case)
    loop.begin(schedule.first_position(case))
    for _ in range(schedule.warm_up - 1):
        loop.run()
    time = time_steps(loop.run, block=schedule.block, rounds=schedule.rounds)
    quartiles = [round(time.low, 1), round(time.high, 1)]
    return {"what": "tensor parallel step", "B": batch, "us": round(time.median, 1), "us_quartiles": quartiles}


def main() -> None:
    """Time the batch sizes asked for and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--batch", default="1,256", help="batch sizes")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--nccl", action="store_true", help="add up over ranks through NCCL, not by the kernel")
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    arguments = parser.parse_args()
    try:
        usable_device("cuda", otherwise="Steps of several GPUs are timed with")
    except ConfigError as error:
        sys.exit(f"tensor_parallel_step: {error}")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    ranks = None if size == 1 else (NcclRanks if arguments.nccl else ProcessRanks)(TensorParallel(size, rank))
    sums = None if size == 1 else "nccl" if arguments.nccl else "kernel"
    model = step_model(arguments.preset, None, ActivationDtype.BFLOAT16, device, ranks=ranks)
    schedule = Schedule(warm_up=32, block=16, rounds=5)
    with growing_file(arguments.json) if arguments.json and rank == 0 else nullcontext() as file:
        for batch in (int(part) for part in arguments.batch.split(",")):
            line = measure(model, schedule, batch, arguments.context)
            line |= {"model": arguments.preset, "gpus": size, "sums": sums, **describe(device)}
            if rank == 0:
                print(json.dumps(line), flush=True)
            if file is not None:
                file.write(json.dumps(line) + "\n")
                file.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
