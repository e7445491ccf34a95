"""Files of whole models with states that mean nothing: refused, or the end of their own request alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.prefix.torch_engines import SAMPLED, WITH_HEAD, TorchBench, prompt
from tests.session.sessions import FAMILIES
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.runtime.transfer import container

CASES = [(FAMILIES[0], "plain", "fp8"), (FAMILIES[1], "ngram", "float16-nvfp4"), (WITH_HEAD, "mtp-sampled", "float32")]
SETTINGS = {**SAMPLED, "max_tokens": 12}
ALIKE = {
    "all bits set": lambda data: b"\xff" * len(data),
    "noise": lambda data: np.random.default_rng(len(data)).bytes(len(data)),
}


def begin(name: str, kind: str, formats: str, steps: int) -> tuple[TorchBench, int]:
    bench = TorchBench(name, kind, formats=formats, chunk=8, slots=3, block=4, outputs=True)
    number = bench.add(prompt(name, 20), **SETTINGS)
    for _ in range(steps):
        bench.step()
    return bench, number


@cache
def alone(name: str, kind: str, formats: str) -> list[int]:
    bench = TorchBench(name, kind, formats=formats, chunk=8)
    return bench.one(prompt(name, 11, 5), **SETTINGS).token_ids


@pytest.mark.parametrize(("name", "kind", "formats"), CASES)
@pytest.mark.parametrize("steps", [2, 6], ids=["in the prompt", "decoding"])
@pytest.mark.parametrize("change", ALIKE)
def test_states_of_nonsense_touch_no_other_request(
    name: str, kind: str, formats: str, steps: int, change: str, tmp_path: Path
) -> None:
    source, number = begin(name, kind, formats, steps)
    source.engine.export_request(number, tmp_path / "whole")
    found = container.read(tmp_path / "whole")
    groups: dict[str, list[str]] = {}
    for array in found.arrays:
        groups.setdefault(array.split("/")[-1].split(" ")[0], []).append(array)
    assert {"cursor", "window", "kv"} <= groups.keys() and ("carry" in groups) is (steps == 2)
    spoil: Callable[[bytes], bytes] = ALIKE[change]
    for group, members in groups.items():
        arrays = dict(found.arrays)
        for array in members:
            dtype, shape, data = arrays[array]
            arrays[array] = (dtype, shape, spoil(data))
        container.write(tmp_path / "bad", found.document, arrays)
        target = TorchBench(name, kind, formats=formats, chunk=8, slots=3, block=4, outputs=True)
        other = target.add(prompt(name, 11, 5), **SETTINGS)
        target.step()
        imported = None
        try:
            imported = target.engine.import_request(tmp_path / "bad")
        except CheckpointError:
            assert group in ("cursor", "draft")
        target.run()
        assert target.done[other].outputs[0].token_ids == alone(name, kind, formats)
        assert imported is None or target.done[imported].finished
        assert target.session.free_slots == 3 and not target.engine._requests
