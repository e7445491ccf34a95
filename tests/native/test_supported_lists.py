"""What the library says it holds is what it takes: a list for each family, one combination a line.

Needs the library, not a GPU: the lists are text, and which kernel a step takes is a function of the sizes.
"""

from __future__ import annotations

import ctypes
import re

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.test_update_launch import MULTIPROCESSORS, update_args
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

FLOAT32 = re.compile(r"(mamba2|gdn) float32 state, (bf16|fp16), d_v (\d+), d_k (\d+), T <= (\d+)")


def held(family: str) -> list[str]:
    """Lines of `rssm_<family>_supported`."""
    function = getattr(ctypes.CDLL(str(harness.LIBRARY)), f"rssm_{family}_supported")
    function.argtypes, function.restype = [], ctypes.c_char_p
    text: bytes = function()
    return text.decode().splitlines()


@pytest.mark.parametrize("family", ["update", "decay_skip", "prefill"])
def test_a_list_names_each_combination_once(family: str) -> None:
    lines = held(family)
    assert lines and all(lines) and len(set(lines)) == len(lines)
    assert {line.split()[0].rstrip(",") for line in lines} <= {kind.value for kind in SsmKind}


def test_updates_of_float32_states_are_taken_as_the_list_says(library: _abi.Library) -> None:
    most: dict[tuple[str, int, int], int] = {}
    for line in held("update"):
        found = FLOAT32.fullmatch(line)
        if found is not None and found[2] == "bf16":
            sizes = (found[1], int(found[3]), int(found[4]))
            most[sizes] = max(most.get(sizes, 0), int(found[5]))
    assert most
    for (family, head_dim, state_dim), tokens in most.items():
        shape = ssm_shape(SsmKind(family), heads=4, groups=2, head_dim=head_dim, state_dim=state_dim)
        for count in range(1, tokens + 1):
            assert library.update_launch_plan(update_args(shape, 2, count), MULTIPROCESSORS).ctas > 0
        other = ssm_shape(SsmKind(family), heads=4, groups=2, head_dim=head_dim + 16, state_dim=state_dim + 16)
        with pytest.raises(UnsupportedError):
            library.update_launch_plan(update_args(other, 2), MULTIPROCESSORS)
