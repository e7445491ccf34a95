"""Every built instance of update, conventional step and prompt scan, small: both activations, every width of a step.

Other tests go through windows, fills and shapes; this one leaves no instance out, which compute-sanitizer's list needs.
"""

from __future__ import annotations

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.narrow import CASES, NarrowTwin, config
from tests.native.prompt_twin import PromptTwin
from tests.native.test_conventional import Problem
from tests.native.twin import Twin
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.launches import UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

ACTIVATIONS = ("bfloat16", "float16")
FAMILIES = [
    pytest.param(SsmKind.MAMBA2, 64, id="mamba2-64"),
    pytest.param(SsmKind.MAMBA2, 80, id="mamba2-80"),
    pytest.param(SsmKind.GDN, 128, id="gdn-128"),
]
SOME_FORMATS = [
    pytest.param(StateFormat.FLOAT32, StateFormat.FLOAT16, id="float32-float16"),
    pytest.param(StateFormat.FLOAT16, StateFormat.NVFP4, id="float16-nvfp4"),
    pytest.param(StateFormat.FP8, None, id="fp8-shared"),
]
SETTLED = _abi.UPDATE_PROGRAMMATIC_LAUNCH | _abi.UPDATE_SETTLED_STATE
FLOAT32 = [  # kernel, tokens, flags, padding rows: plain decoding of GDN has a kernel for few rows and one for more
    *(pytest.param(UpdateKernel.PLAIN, 1, flags, padding, id=f"plain-{count}{how}")
      for flags, how in ((0, ""), (SETTLED, "-settled")) for padding, count in ((0, "few"), (60, "many"))),
    *(pytest.param(kernel, tokens, 0, 0, id=f"{kernel.name.lower()}-{tokens}")
      for kernel in (UpdateKernel.DIRECT, UpdateKernel.STREAMED) for tokens in (1, 4, 8, 16)),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "tokens", "flags", "padding"), FLOAT32)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "head_dim"), FAMILIES)
def test_float32_states(
    library: _abi.Library, kind: SsmKind, head_dim: int, act: str, kernel: UpdateKernel, tokens: int, flags: int,
    padding: int,
) -> None:  # fmt: skip
    """Four steps with flushes; a row of fewer tokens, a padding row."""
    replay = ReplayConfig(window=max(tokens, 2), max_step_tokens=tokens)
    twin = Twin(library, ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128), replay, act, slots=3)
    twin.pool.launch, twin.pool.flags = UpdateLaunch(kernel=kernel), flags
    for slot in (0, 2):
        twin.admit(slot, origin=slot)
    for step in range(4):
        fewer = max(tokens - step, 1)
        slots, counts = [2, -1, 0] + [-1] * padding, [tokens, tokens, fewer] + [1] * padding
        twin.step(slots, counts, [tokens, 0, fewer] + [0] * padding, tokens)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "head_dim"), FAMILIES)
@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_narrow_states(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, kind: SsmKind, head_dim: int, act: str,
    tokens: int,
) -> None:  # fmt: skip
    """A row that flushes, one that does not, a padding row."""
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    twin = NarrowTwin(library, shape, config(recurrence, read, 16, tokens), act, slots=3)
    for slot, (h, origin) in enumerate([(16, 5), (3, 9)]):
        twin.admit(slot, h, origin)
    twin.step([1, -1, 0], [tokens, tokens, tokens], tokens=tokens)
    twin.check_neighbours()


@pytest.mark.parametrize("flags", [0, SETTLED], ids=["plain", "settled"])
@pytest.mark.parametrize(("kind", "head_dim"), [FAMILIES[0], FAMILIES[2]])
@pytest.mark.parametrize(("recurrence", "read"), SOME_FORMATS)
def test_narrow_states_of_more_parts_than_ctas(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, kind: SsmKind, head_dim: int, flags: int
) -> None:
    """A head or two are a part, of which Mamba-2's 144 CTAs have four each, GDN's 264 one or two (132 multiprocessors):
    CTAs that stay go on to others. Rows of all depths.
    """
    shape, rows = ssm_shape(kind, heads=8, groups=8, head_dim=head_dim, state_dim=128), 72
    twin = NarrowTwin(library, shape, config(recurrence, read), "bfloat16", slots=rows, flags=flags)
    for slot in range(rows):
        twin.admit(slot, slot % 17, slot % 7)
    slots = [-1 if row == 40 else rows - 1 - row for row in range(rows)]
    twin.step(slots, [0 if row == 50 else 1 for row in range(rows)], tokens=1)
    twin.check_neighbours()


@pytest.mark.parametrize("rows", [2, 42], ids=["few", "many"])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "head_dim"), FAMILIES)
def test_conventional_steps(
    library: _abi.Library, kind: SsmKind, head_dim: int, act: str, tokens: int, rows: int
) -> None:
    """In place and with a state after each token, at both ends of the launch choice; one row is padding."""
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    slots = [-1 if row == 1 else rows - row for row in range(rows)]
    problem = Problem(shape, slots, [tokens] * rows, tokens, entries=1 if tokens == 1 else tokens + 1, act=act)
    problem.run(library)
    problem.check()


@pytest.mark.parametrize("state_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "head_dim"), [*FAMILIES, pytest.param(SsmKind.GDN, 64, id="gdn-64")])
def test_prompts(library: _abi.Library, kind: SsmKind, head_dim: int, act: str, state_dim: int) -> None:
    """Behind records, behind none, padding."""
    shape = ssm_shape(kind, heads=4, groups=2, head_dim=head_dim, state_dim=state_dim)
    twin = PromptTwin(library, shape, ReplayConfig(window=16), act, slots=2)
    for slot in range(2):
        twin.admit(slot, origin=slot)
    twin.remember(1, 3)
    twin.prefill([1, -1, 0], [18, 18, 5], tokens=18)
