"""The largest batch that a device holds with one kind of state cache, by the memory planner."""

from __future__ import annotations

import torch

from trtllm_replayssm.bench.step.cases import Schedule, StepCase
from trtllm_replayssm.bench.step.model import StepModel
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.planner import MemoryPlan, plan_memory
from trtllm_replayssm.weights.sizes import model_bytes

_SHARE = 0.97  # of what the plan leaves: allocations come in pieces
_MULTIPLE = 16


def largest_rows(model: StepModel, case: StepCase, schedule: Schedule) -> int:
    """Rows, a multiple of 16, whose slots fit beside the weights; nothing else is on the device.

    case: its cache, tokens and context count. Raises ConfigError where none fit, or without a GPU.
    """
    rows = rows_that_fit(model, case, schedule)
    if rows is None or rows < _MULTIPLE:
        wanted = f"a CUDA device that holds {_MULTIPLE} rows"
        raise ConfigError("bench step", "largest", expected=wanted, got=f"{model.device} with {rows}")
    return rows // _MULTIPLE * _MULTIPLE


def rows_that_fit(model: StepModel, case: StepCase, schedule: Schedule) -> int | None:
    """Rows whose slots a GPU holds beside the weights and nothing else; None on a CPU."""
    if model.device.type != "cuda":
        return None
    return step_plan(model, case, schedule, memory=torch.cuda.mem_get_info(model.device)[1]).slots


def step_plan(model: StepModel, case: StepCase, schedule: Schedule, memory: int = 0) -> MemoryPlan:
    """The memory plan of a case's cache and tokens on a device of `memory` bytes; there are no prompts."""
    pool = PoolConfig(slots=1, max_seq_len=schedule.last_position(case), activation=model.activation)
    return plan_memory(
        model.geometry, case.replay, pool, memory=memory, conventional=case.conventional, prompt_tokens=0,
        prompts=0, weights=model_bytes(model.geometry, model.format_of, model.activation.itemsize), fraction=_SHARE,
    )  # fmt: skip
