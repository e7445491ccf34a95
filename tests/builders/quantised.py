"""The tiny checkpoints and their quantised forms, made once per test process. No test here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.builders.stand_ins import make_stand_in
from tests.paths import find_model
from trtllm_replayssm.builders.quantize import quantize

TINY = ("nemotron-tiny", "nemotron-moe-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny")
# FP8 where the public mixed checkpoint has it: some input and output projections
FP8_PATTERNS = {"nemotron": ("*.mixer.in_proj", "*.mixer.o_proj"), "qwen3_5": ("*.in_proj_qkv", "*.o_proj")}


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="replayssm-mixes-")


@cache
def bf16_checkpoint(name: str) -> Path:
    """The BF16 original of that name; where it is not installed, a committed checkpoint of the same kind."""
    return find_model(name) or make_stand_in(name, Path(_folder().name) / "bf16" / name)


@cache
def mixed_checkpoint(name: str) -> Path:
    """NVFP4 with some FP8 projections, made by our own `quantize` from the BF16 one."""
    destination = Path(_folder().name) / name
    quantize(bf16_checkpoint(name), destination, recipe="dense", fp8=FP8_PATTERNS[name.partition("-")[0]])
    return destination
