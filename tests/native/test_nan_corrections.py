"""NaN in an input of a token reaches that token and later ones and stays NaN in what they leave, and nothing earlier.

Oracles: the same launch without the NaN, to the bit, for what the NaN must not reach; the reference operations for
where there is NaN. Each case has a row that does not flush and one that does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.narrow import CASES, FP32, NarrowTwin, config, state_tensors
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.launches import UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops.reference.commit import commit
    from trtllm_replayssm.ops.reference.gdn import gdn_update
    from trtllm_replayssm.ops.reference.mamba2 import mamba2_update
    from trtllm_replayssm.ops.reference.rows import step_rows

KINDS = [
    pytest.param(SsmKind.MAMBA2, 64, id="mamba2-64"),
    pytest.param(SsmKind.MAMBA2, 80, id="mamba2-80"),
    pytest.param(SsmKind.GDN, 128, id="gdn"),
]
HEADS, GROUPS, HEAD, ELEMENT = 4, 2, 1, 5  # the NaN is in this head, or its group 0, and element
LAUNCHES = [
    pytest.param(UpdateKernel.DIRECT, 0, id="direct"),
    pytest.param(UpdateKernel.STREAMED, 150, id="streamed"),
    pytest.param(UpdateKernel.PLAIN, 0, id="plain-few"),
    pytest.param(UpdateKernel.PLAIN, 60, id="plain-many"),
]


def same_bits(got: Any, expected: Any) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8).cpu(), expected.contiguous().view(torch.uint8).cpu())


@dataclass
class Step:
    """What a launch left: outputs [B, T, H, P] and the state's tensors by name."""

    out: Any
    state: dict[str, Any]


class Sequences:
    """Slot 0 flushes in its second step, slot 1 in its first; every row has `tokens` tokens."""

    def __init__(self, twin: NarrowTwin, tokens: int, padding: int = 0) -> None:
        self.twin, self.tokens = twin, tokens
        self.slots, self.counts = [1, -1, 0] + [-1] * padding, [tokens] * (3 + padding)
        self.live = [0, 2]  # rows
        window = twin.config.window
        twin.admit(0, h=window - tokens, origin=3)
        twin.admit(1, h=window - tokens + 1, origin=twin.config.ring_rows - 2)
        self.chosen = step_rows("step", torch.tensor(self.slots), torch.tensor(self.counts), twin.slots, tokens)

    def inputs(self) -> dict[str, Any]:
        return self.twin.inputs(self.slots, self.counts, self.tokens)

    def launch(self, rows: dict[str, Any], before: dict[str, Any] | None = None) -> Step:
        """On a copy of the state, or of another one on the device."""
        tensors = state_tensors(self.twin.state) if before is None else before
        device = {name: tensor.cuda().clone() for name, tensor in tensors.items()}
        return Step(self.twin.launch(device, rows, self.slots, self.counts), device)

    def reference(self, rows: dict[str, Any], before: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Outputs, and the state behind them."""
        twin, state = self.twin, copy.deepcopy(self.twin.state)
        for name, tensor in (before or {}).items():
            own = state_tensors(state)[name]
            bits = torch.uint8 if own.element_size() == 1 else own.dtype
            own.view(bits).copy_(tensor.view(bits).cpu())
        x, k, q = rows["value"], rows["k"], rows["q"]
        if twin.gdn:
            out = gdn_update(state, twin.cursors, self.chosen, q, k, x, rows["log_decay"], rows["beta"])
        else:
            out = mamba2_update(state, twin.cursors, self.chosen, x, k, q, rows["dt"], twin.a, d_skip=twin.skip)
        return out, state

    def ring_rows(self, slot: int, first: int, last: int) -> list[int]:
        """Of tokens first .. last - 1."""
        cursors = self.twin.cursors
        start = int(cursors.origin[slot]) + int(cursors.h[slot])
        return [(start + token) % self.twin.config.ring_rows for token in range(first, last)]

    def commit(self, accepted: int) -> None:
        commit(self.twin.config, self.twin.cursors, self.chosen, torch.tensor([accepted] * len(self.slots)))


def poisoned(rows: dict[str, Any], name: str, token: int) -> dict[str, Any]:
    """The rows, with NaN in one element of a token, or a number of one head."""
    found = {key: tensor.clone() for key, tensor in rows.items()}
    unit = HEAD // (HEADS // GROUPS) if name in ("k", "q") else HEAD
    place = (slice(None), token, unit)
    found[name][(*place, ELEMENT) if found[name].dim() == 4 else place] = float("nan")
    return found


def check_before(step: Sequences, name: str, token: int, clean: Step, got: Step) -> None:
    """Earlier tokens' outputs and records, other heads' outputs and what a flush wrote are as without the NaN."""
    shared = HEADS // GROUPS
    own = range(HEAD // shared * shared, (HEAD // shared + 1) * shared) if name in ("k", "q") else [HEAD]
    others = [head for head in range(HEADS) if head not in own]
    for row in step.live:
        assert same_bits(got.out[row, :token], clean.out[row, :token]), (name, token, row)
        assert same_bits(got.out[row, :, others], clean.out[row, :, others]), (name, token, row)
    for key, tensor in got.state.items():
        if not key.startswith("ring"):
            assert same_bits(tensor, clean.state[key]), (name, token, key)
            continue
        for slot in (0, 1):
            rows = step.ring_rows(slot, 0, token)
            assert same_bits(tensor[slot][:, rows], clean.state[key][slot][:, rows]), (name, token, key)


def check_places(step: Sequences, what: object, got: Step, expected: Any, state: Any) -> None:
    """NaN is where the reference has it: outputs, rings and recurrence."""
    for row in step.live:
        assert torch.equal(got.out[row].isnan().cpu(), expected[row].isnan()), (what, row)
    for key, tensor in state_tensors(state).items():
        if key.startswith("ring"):
            assert torch.equal(got.state[key].isnan().cpu(), tensor.isnan()), (what, key)
    found = copy.deepcopy(state)
    bits = torch.uint8 if state.checkpoint.data.element_size() == 1 else state.checkpoint.data.dtype
    found.checkpoint.data.view(bits).copy_(got.state["checkpoint"].view(bits).cpu())
    slots = torch.tensor([0, 1])
    assert torch.equal(found.checkpoint.load(slots).isnan(), state.checkpoint.load(slots).isnan()), (what, "checkpoint")


def check(step: Sequences, name: str, token: int) -> None:
    rows = step.inputs()
    marked, cursors = poisoned(rows, name, token), copy.deepcopy(step.twin.cursors)
    clean, got = step.launch(rows), step.launch(marked)
    check_before(step, name, token, clean, got)
    check_places(step, (name, token), got, *step.reference(marked))

    step.commit(token)  # the NaN is rejected
    after = step.inputs()
    clean, rest = step.launch(after, clean.state), step.launch(after, got.state)
    check_before(step, name, step.tokens, clean, rest)

    step.twin.cursors = copy.deepcopy(cursors)
    step.commit(step.tokens)  # slot 0 folds it
    rest = step.launch(after, got.state)
    check_places(step, (name, token, "accepted"), rest, *step.reference(after, got.state))
    step.commit(step.tokens)  # slot 0 reads what it left
    last = step.launch(after, rest.state)
    check_places(step, (name, token, "folded"), last, *step.reference(after, rest.state))
    step.twin.cursors = cursors


def check_all(step: Sequences) -> None:
    numbers = ("log_decay", "beta") if step.twin.gdn else ("dt",)
    for name in ("value", "k", "q", *numbers):
        for token in sorted({step.tokens // 2, step.tokens - 1}):
            check(step, name, token)


def make_twin(library: _abi.Library, kind: SsmKind, head_dim: int, settings: Any, act: str) -> NarrowTwin:
    shape = ssm_shape(kind, heads=HEADS, groups=GROUPS, head_dim=head_dim, state_dim=128)
    return NarrowTwin(library, shape, settings, act, slots=2)


@pytest.mark.parametrize(("launch", "padding"), LAUNCHES)
@pytest.mark.parametrize(("tokens", "window"), [(1, 16), (2, 8), (4, 16), (8, 16), (8, 40), (12, 16)])
@pytest.mark.parametrize(("kind", "head_dim"), KINDS)
def test_float32_states(
    library: _abi.Library, kind: SsmKind, head_dim: int, tokens: int, window: int, launch: UpdateKernel, padding: int
) -> None:
    if launch is UpdateKernel.PLAIN and tokens > 1:
        pytest.skip("one token a row")
    twin = make_twin(library, kind, head_dim, config(FP32, None, window, tokens), "bfloat16")
    twin.asked = UpdateLaunch(kernel=launch)
    check_all(Sequences(twin, tokens, padding))


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("kind", "head_dim"), KINDS)
@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_narrow_states(
    library: _abi.Library,
    recurrence: StateFormat,
    read: StateFormat | None,
    kind: SsmKind,
    head_dim: int,
    tokens: int,
    act: str,
) -> None:
    twin = make_twin(library, kind, head_dim, config(recurrence, read, 16, tokens), act)
    check_all(Sequences(twin, tokens))
