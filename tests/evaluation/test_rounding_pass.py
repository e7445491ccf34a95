"""Float32 checkpoints that are rounded after each write are a pool of the format they are rounded to."""

from __future__ import annotations

import pytest
import torch

from tests.evaluation.small import PROMPT, random_streams, small_model
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model, needs_rounding_pass, widest_step

FORMATS = ["shared-nvfp4-sr-L4", "shared-nvfp4-rtn-L4", "shared-fp8-rtn-L4"]


def runs(model_name: str, name: str) -> tuple[ForcedDecoding, ForcedDecoding]:
    """The pool itself, and float32 checkpoints with the pass."""
    model, replay = small_model(model_name), parse_configuration(name, 3).replay
    streams = random_streams(model, 2, PROMPT + 24)
    exact, passed = (ForcedDecoding(model, replay, streams, PROMPT, rounding_pass=p) for p in (False, True))
    return exact, passed


@pytest.mark.parametrize("name", FORMATS)
def test_every_state_and_output_is_the_pools(name: str) -> None:
    """Mamba-2, a prompt and five flushes: bit for bit."""
    exact, passed = runs("nemotron-dense", name)
    for _ in range(8):
        assert torch.equal(passed.step(3), exact.step(3))
    assert torch.equal(passed.states(), exact.states())


@pytest.mark.parametrize("name", FORMATS)
def test_few_codes_of_gdn_differ(name: str) -> None:
    """Checkpoints of the first layer, whose inputs are exact, after the prompt and a flush.

    A correction's rounding moves a folded value by up to 2^-11 of it, of a step of 2^-4 and more of the value: it takes
    another code, or its block another scale, with a chance of about 2^-7. Without rounding most values differ.
    """
    exact, passed = runs("qwen-dense", name)
    plain = ForcedDecoding(small_model("qwen-dense"), parse_configuration("shared-fp32-L4", 3).replay, exact.streams, 4)
    for run in (exact, passed, plain):
        for tokens in (3, 1, 1):
            run.step(tokens)
    states = [next(iter(run.session.pools.ssm.values())) for run in (exact, passed, plain)]
    want, *others = (s.checkpoint.load(torch.tensor(exact.slots)) for s in states)  # type: ignore[union-attr]
    large = want.abs() > 0.02 * want.abs().amax(dim=(-2, -1), keepdim=True)
    moved = [((other - want).abs() > 2.0**-7 * want.abs())[large] for other in others]
    differs, control = (float(m.float().mean()) for m in moved)
    assert differs < 0.03 and control > 0.5


def test_it_stands_in_where_kernels_lack_the_format_only() -> None:
    """Shared NVFP4 and rounding to nearest, with 16-bit activations on a GPU; never on a CPU."""
    cpu = small_model("nemotron-dense")
    gpu = Model(cpu.checkpoint, cpu.weights, ActivationDtype.FLOAT16, torch.device("cuda"))
    names = [*FORMATS, "shared-fp32-L4", "shared-fp8-sr-L4", "separate-nvfp4-fp8-rtn-L4"]
    needed = [name for name in names if needs_rounding_pass(gpu, parse_configuration(name).replay)]
    assert needed == FORMATS
    assert not any(needs_rounding_pass(cpu, parse_configuration(name).replay) for name in names)


@pytest.mark.parametrize(("model_name", "narrow"), [("nemotron-dense", 8), ("qwen-dense", 4)])
def test_steps_are_as_wide_as_the_kernels_of_a_format_take(model_name: str, narrow: int) -> None:
    cpu = small_model(model_name)
    gpu = Model(cpu.checkpoint, cpu.weights, ActivationDtype.FLOAT16, torch.device("cuda"))
    names = ["shared-fp32-L64", "shared-nvfp4-sr-L64", "shared-fp8-sr-L64", "separate-fp8-fp32-L64"]
    assert [widest_step(gpu, parse_configuration(n).replay) for n in names] == [16, 16, narrow, narrow]
    reference = Model(cpu.checkpoint, cpu.weights, ActivationDtype.FLOAT32, torch.device("cuda"))
    assert {widest_step(m, parse_configuration(n).replay) for m in (cpu, reference) for n in names} == {16}
