"""The native commit of many rows at once, against the rule of spec/cursors.py: one launch moves all, for all layers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.native import harness
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.spec import cursors as spec_cursors
from trtllm_replayssm.spec.cursors import Cursors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops import _abi
    from trtllm_replayssm.ops.layer_state import CursorTensors, StepRows
    from trtllm_replayssm.ops.reference.commit import commit_conventional


@pytest.mark.parametrize("rows", [1, 128, 129, 1000])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_conventional_rows_move_to_the_snapshot_of_the_last_accepted_token(
    library: _abi.Library, tokens: int, rows: int
) -> None:
    """Against the reference operation; counts out of range, padding, slots that do not exist, idle slots."""
    rng, slots = np.random.default_rng(rows), rows + 5
    entries = torch.from_numpy(rng.integers(0, tokens + 1, slots).astype(np.int32))
    want = CursorTensors.allocate(slots, torch.device("cpu"))
    want.origin, want.position = entries.clone(), torch.arange(slots, dtype=torch.int32)
    got = [want.origin.cuda(), want.position.cuda()]
    order = rng.permutation(slots)[:rows]
    order[rng.random(rows) < 0.2] = -1
    wide = np.stack([order, rng.integers(0, tokens + 1, rows), rng.integers(-2, tokens + 3, rows)], axis=1)
    host = torch.from_numpy(wide.astype(np.int32))
    config = ReplayConfig(window=16, max_step_tokens=tokens)
    commit_conventional(config, want, StepRows(host[:, 0], host[:, 1]), host[:, 2])
    host[host[:, 0] < 0, 0] = torch.tensor([-1, slots, slots + 7], dtype=torch.int32)[torch.arange(rows) % 3][order < 0]
    device = host.cuda()
    args = _abi.ConventionalCommitArgs(
        entries=tokens + 1, slot=harness.view(device[:, 0]), num_tokens=harness.view(device[:, 1]),
        accepted=harness.view(device[:, 2]), entry=harness.view(got[0]), position=harness.view(got[1]),
    )  # fmt: skip
    library.conventional_commit(args, harness.Pool._stream())
    assert got[0].tolist() == want.origin.tolist() and got[1].tolist() == want.position.tolist()


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (16, 1), (16, 8), (64, 16), (3, 3)])
def test_rows_of_any_number_follow_the_rule(library: _abi.Library, window: int, tokens: int, rows: int) -> None:
    """Accepted counts below zero and above the row's tokens are clamped; padding rows and idle slots keep all."""
    config = ReplayConfig(window=window, max_step_tokens=tokens)
    rng, slots = np.random.default_rng(rows), rows + 5
    expected = [
        Cursors(origin=int(rng.integers(config.ring_rows)), h=int(rng.integers(window + 1)), position=slot)
        for slot in range(slots)
    ]
    registers = {
        name: torch.tensor([getattr(c, name) for c in expected], dtype=torch.int32, device="cuda")
        for name in ("origin", "h", "position")
    }
    order = rng.permutation(slots)[:rows]
    order[rng.random(rows) < 0.2] = -1
    wide = np.stack([order, rng.integers(0, tokens + 1, rows), rng.integers(-2, tokens + 3, rows)], axis=1)
    device = torch.from_numpy(wide.astype(np.int32)).cuda()
    args = _abi.CommitArgs(
        window=window, ring_rows=config.ring_rows, slot=harness.view(device[:, 0]),
        num_tokens=harness.view(device[:, 1]), accepted=harness.view(device[:, 2]),
        **{name: harness.view(t) for name, t in registers.items()},
    )  # fmt: skip
    library.commit(args, harness.Pool._stream())
    for slot, count, accepted in wide.tolist():
        if slot >= 0:
            spec_cursors.commit(config, expected[slot], count, accepted)
    for name, tensor in registers.items():
        assert tensor.tolist() == [getattr(c, name) for c in expected], name
