"""Names of configurations and the pools they stand for."""

from __future__ import annotations

import pytest

from trtllm_replayssm.cli.evaluate import DEFAULT_CONFIGURATIONS
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration

F32, F16, FP8, NVFP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4


@pytest.mark.parametrize(
    "name,recurrence,rounding,read,window",
    [
        ("shared-fp32-L16", F32, Rounding.STOCHASTIC, None, 16),
        ("shared-fp8-sr-L1", FP8, Rounding.STOCHASTIC, None, 1),
        ("shared-nvfp4-rtn-L64", NVFP4, Rounding.NEAREST, None, 64),
        ("separate-nvfp4-fp32-L4", F32, Rounding.STOCHASTIC, NVFP4, 4),
        ("separate-fp8-fp16-sr-L16", F16, Rounding.STOCHASTIC, FP8, 16),
    ],
)
def test_a_name_says_formats_rounding_and_window(
    name: str, recurrence: StateFormat, rounding: Rounding, read: StateFormat | None, window: int
) -> None:
    found = parse_configuration(name)
    assert found.name == name
    assert found.replay == ReplayConfig(window=window, recurrence=recurrence, recurrence_rounding=rounding, read=read)


def test_a_step_is_narrower_than_the_window() -> None:
    steps = {w: parse_configuration(f"shared-fp8-sr-L{w}", 8).replay.max_step_tokens for w in (1, 2, 8, 64)}
    assert steps == {1: 1, 2: 1, 8: 7, 64: 8}


@pytest.mark.parametrize(
    "name",
    ["shared-fp8-L16", "shared-fp32-sr-L16", "separate-fp8-L16", "shared-fp8-sr", "shared-fp8-sr-L0", "fp8-L16",
     "separate-nvfp4-fp32-L1", "shared-fp8-sr-L65"],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        _ = parse_configuration(name).replay


def test_the_default_configurations_exist() -> None:
    assert len({parse_configuration(name) for name in DEFAULT_CONFIGURATIONS.split(",")}) == 9
