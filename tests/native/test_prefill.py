"""The native prompt scan of both families against the specification (see prompt_twin.py)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.prompt_twin import PromptTwin, commit_prefill, prefill_args, run_prefill
from tests.native.twin import torch_module
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import CapacityError, ContractError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

# Family, d_v, d_k: the tuned kernels first.
KERNELS = [
    pytest.param(SsmKind.MAMBA2, 64, 128, id="mamba2-64"),
    pytest.param(SsmKind.MAMBA2, 80, 128, id="mamba2-80"),
    pytest.param(SsmKind.GDN, 128, 128, id="gdn-128"),
]
OTHERS = [
    (SsmKind.MAMBA2, 128, 64), (SsmKind.MAMBA2, 96, 96), (SsmKind.MAMBA2, 64, 256), (SsmKind.MAMBA2, 96, 128),
    (SsmKind.GDN, 64, 64), (SsmKind.GDN, 80, 96), (SsmKind.GDN, 96, 256), (SsmKind.GDN, 64, 128),
]  # fmt: skip


def base_shape(kind: SsmKind = SsmKind.MAMBA2, head_dim: int = 64, state_dim: int = 128) -> SsmShape:
    return ssm_shape(kind, heads=6, groups=2, head_dim=head_dim, state_dim=state_dim)


def remember(twin: PromptTwin, slots: list[int], counts: list[int]) -> None:
    """counts[i] committed records for slots[i]: what the prompt folds first."""
    for slot, count in zip(slots, counts, strict=True):
        twin.remember(slot, count)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), KERNELS)
def test_ragged_prompts_match_the_specification(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int, act: str
) -> None:
    twin = PromptTwin(library, base_shape(kind, head_dim, state_dim), ReplayConfig(window=16), act, slots=9)
    for slot in range(8):
        twin.admit(slot, origin=slot)
    twin.prefill([7, -1, 0, 2, 3, 1, 6, 5, 4], [200, 200, 0, 1, 63, 64, 65, 128, 129], tokens=200)


@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), OTHERS)
def test_every_size_matches_the_specification(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int
) -> None:
    twin = PromptTwin(library, base_shape(kind, head_dim, state_dim), ReplayConfig(window=16), "bfloat16", slots=3)
    for slot in range(3):
        twin.admit(slot, origin=slot)
    remember(twin, [0, 2], [5, 16])
    twin.prefill([2, 1, 0], [33, 100, 31], tokens=101)


@pytest.mark.parametrize("window", [1, 16, 40, 64])
@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), KERNELS)
def test_pending_records_are_folded_first(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int, window: int
) -> None:
    twin = PromptTwin(library, base_shape(kind, head_dim, state_dim), ReplayConfig(window=window), "bfloat16", slots=4)
    for slot in range(4):
        twin.admit(slot, origin=(5 * slot) % twin.config.ring_rows)
    remember(twin, [3, 0, 1], [window, window - 1, 1])
    twin.prefill([0, 1, 2, 3], [70, 2, 3, 64], tokens=70)
    for slot in (2, 0):
        twin.step([slot], [1], [1], tokens=1)


@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), KERNELS)
def test_chunks_of_a_prompt_keep_a_float32_carry(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int
) -> None:
    """Two prompts in chunks, their carries crossed, one of them fresh; a third row is done at once."""
    twin = PromptTwin(library, base_shape(kind, head_dim, state_dim), ReplayConfig(window=16), "bfloat16", slots=3)
    for slot in range(3):
        twin.admit(slot, origin=slot)
    remember(twin, [0, 1, 2], [7, 3, 9])
    twin.prefill([0, 1, 2], [65, 40, 3], tokens=80, last=[False, False, True], fresh=(1,), carries=[2, 1, 0])
    twin.prefill([1, 0], [64, 1], tokens=64, last=[False, False], carries=[1, 2])
    twin.prefill([0, 1], [100, 17], tokens=100, carries=[2, 1])
    twin.step([0, 1, 2], [1, 1, 1], [1, 1, 1], tokens=1)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100])
@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), KERNELS)
def test_any_split_gives_the_same_state_to_rounding(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int, cut: int
) -> None:
    torch = torch_module()
    twin = PromptTwin(library, base_shape(kind, head_dim, state_dim), ReplayConfig(window=16), "bfloat16", slots=2)
    for slot in (0, 1):
        twin.admit(slot)
    pool, state = twin.pool, twin.pool.tensors["checkpoint"]
    state[1] = state[0]
    rows = twin.make_prompt([0], [150], 150)
    out = torch.empty((1, 150, *rows["value"].shape[2:]), dtype=twin.dtype, device="cuda")
    run_prefill(pool, rows, out)
    outs = []
    for begin, end in ((0, cut), (cut, 150)):
        part = {n: t[:, begin:end] if t.ndim > 2 else t for n, t in rows.items()}
        part["slot"] = torch.tensor([1], dtype=torch.int32, device="cuda")
        part["num_tokens"] = torch.tensor([end - begin], dtype=torch.int32, device="cuda")
        outs.append(torch.empty_like(out[:, begin:end]))
        run_prefill(pool, part, outs[-1])
    scale = state[0].abs().amax(dim=(1, 2))
    assert ((state[1] - state[0]).abs().amax(dim=(1, 2)) <= 2e-6 * scale).all()
    parts = torch.cat(outs, dim=1).float()
    assert ((parts - out.float()).abs() <= 2.0**-7 * out.float().abs() + 1e-4 * out.float().abs().amax()).all()


def test_all_decay_gone_stays_finite(library: _abi.Library) -> None:
    twin = PromptTwin(library, base_shape(), ReplayConfig(window=16), "bfloat16", slots=1)
    twin.a[:] = -1e30
    twin.admit(0)
    remember(twin, [0], [3])
    twin.prefill([0], [130], tokens=140)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_more_heads_than_multiprocessors(library: _abi.Library, head_dim: int) -> None:
    """Rows of all lengths, several CTAs on every multiprocessor."""
    shape = ssm_shape(SsmKind.MAMBA2, heads=24, groups=2, head_dim=head_dim, state_dim=128)
    twin = PromptTwin(library, shape, ReplayConfig(window=16), "bfloat16", slots=15)
    for slot in range(15):
        twin.admit(slot, origin=slot)
    remember(twin, [1, 4], [16, 3])
    slots = [*range(14), -1]
    twin.prefill(slots, [129, 64, 0, 1, 70, *[5 + slot for slot in range(5, 14)], 20], tokens=130)


@pytest.mark.parametrize("rows", [1, 12])
def test_real_shapes_and_shared_heads(library: _abi.Library, rows: int) -> None:
    """One row splits a head's state over several multiprocessors; many rows do not."""
    shape = ssm_shape(SsmKind.GDN, heads=16, groups=4, head_dim=128, state_dim=128)
    twin = PromptTwin(library, shape, ReplayConfig(window=16), "bfloat16", slots=rows)
    for slot in range(rows):
        twin.admit(slot)
    twin.prefill(list(range(rows)), [66] * rows, tokens=66)


@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), KERNELS)
def test_hundred_identical_launches_give_one_hash(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int
) -> None:
    torch = torch_module()
    twin = PromptTwin(library, base_shape(kind, head_dim, state_dim), ReplayConfig(window=16), "bfloat16", slots=40)
    for slot in range(40):
        twin.admit(slot)
    saved = twin.pool.tensors["checkpoint"].clone()
    rows = twin.make_prompt(list(range(40)), [200 - slot for slot in range(40)], 200)
    workspace = torch.zeros(1, dtype=torch.uint8, device="cuda")
    out = torch.empty((40, 200, *rows["value"].shape[2:]), dtype=twin.dtype, device="cuda")
    workspace = torch.zeros(library.prefill_workspace(prefill_args(twin.pool, rows, out)), dtype=torch.uint8).cuda()
    hashes = set()
    for _ in range(100):
        twin.pool.tensors["checkpoint"].copy_(saved)
        out.fill_(float("nan"))
        run_prefill(twin.pool, rows, out, workspace=workspace)
        words = [t.contiguous().view(torch.int16).long().flatten() for t in (twin.pool.tensors["checkpoint"], out)]
        hashes.add(tuple(int((w * torch.arange(1, len(w) + 1, device="cuda")).sum()) for w in words))
    assert len(hashes) == 1


def test_graph_replay_follows_slots_and_cursors(library: _abi.Library) -> None:
    """Scan and commit captured once; replayed for other slots, lengths and records."""
    torch = torch_module()
    twins = [
        PromptTwin(library, base_shape(SsmKind.GDN, 128), ReplayConfig(window=16), "bfloat16", slots=4)
        for _ in range(2)
    ]
    for twin in twins:
        for slot in range(4):
            twin.admit(slot)
        remember(twin, [0, 1, 2, 3], [4, 0, 16, 9])
    eager, captured = twins
    shape = (2, 90, 6, 128)
    rows = captured.make_prompt([0, 1], [90, 90], 90)
    out = torch.full(shape, float("nan"), dtype=captured.dtype, device="cuda")
    args = prefill_args(captured.pool, rows, out)
    workspace = torch.zeros(library.prefill_workspace(args), dtype=torch.uint8, device="cuda")
    idle = torch.tensor([-1, -1], dtype=torch.int32, device="cuda")
    rows["slot"].copy_(idle)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_prefill(captured.pool, rows, out, workspace=workspace)
        commit_prefill(captured.pool, rows["slot"], rows["num_tokens"], 90)
    for slots, counts in (([2, 0], [90, 5]), ([3, -1], [64, 90]), ([1, 2], [0, 65])):
        fresh = eager.make_prompt(slots, counts, 90)
        for name, tensor in rows.items():
            tensor.copy_(fresh[name])
        expected = torch.full(shape, float("nan"), dtype=eager.dtype, device="cuda")
        run_prefill(eager.pool, fresh, expected)
        commit_prefill(eager.pool, fresh["slot"], fresh["num_tokens"], 90)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
        for name, tensor in captured.pool.tensors.items():
            bits = torch.int16 if tensor.element_size() == 2 else torch.int32
            assert torch.equal(tensor.view(bits), eager.pool.tensors[name].view(bits)), name


def test_a_long_prompt_does_not_drift(library: _abi.Library) -> None:
    """Forty chunks of a slowly forgetting state: the error stays that of float32."""
    for kind, head_dim in ((SsmKind.MAMBA2, 64), (SsmKind.GDN, 128)):
        shape = ssm_shape(kind, heads=2, groups=1, head_dim=head_dim, state_dim=128)
        twin = PromptTwin(library, shape, ReplayConfig(window=16), "bfloat16", slots=1)
        twin.a[:] = -np.array([0.001, 0.02], np.float32)
        twin.admit(0)
        twin.prefill([0], [2560], tokens=2560)


class TestRefusals:
    """Bad arguments never reach a kernel."""

    def prepared(self, library: _abi.Library, **changes: object) -> tuple[PromptTwin, dict[str, object], object]:
        torch = torch_module()
        twin = PromptTwin(library, base_shape(), ReplayConfig(window=16), "bfloat16", slots=2)
        rows = twin.make_prompt([0], [8], 8)
        out = torch.empty(rows["value"].shape, dtype=twin.dtype, device="cuda")
        return twin, rows | changes, out

    def test_a_shape_that_disagrees(self, library: _abi.Library) -> None:
        twin, rows, out = self.prepared(library)
        rows["q"] = rows["q"][:, :7]
        with pytest.raises(ContractError, match="q"):
            run_prefill(twin.pool, rows, out)

    def test_a_size_that_is_not_built_lists_what_is(self, library: _abi.Library) -> None:
        shape = base_shape(state_dim=32)
        twin = PromptTwin(library, shape, ReplayConfig(window=16), "bfloat16", slots=2)
        rows = twin.make_prompt([0], [8], 8)
        out = torch_module().empty(rows["value"].shape, dtype=twin.dtype, device="cuda")
        with pytest.raises(UnsupportedError, match="d_k 128"):
            run_prefill(twin.pool, rows, out)

    def test_a_small_workspace(self, library: _abi.Library) -> None:
        torch = torch_module()
        twin = PromptTwin(library, base_shape(SsmKind.GDN, 128), ReplayConfig(window=16), "bfloat16", slots=2)
        rows = twin.make_prompt([0], [8], 8)
        out = torch.empty((1, 8, 6, 128), dtype=twin.dtype, device="cuda")
        with pytest.raises(CapacityError, match="workspace"):
            run_prefill(twin.pool, rows, out, workspace=torch.zeros(1024, dtype=torch.uint8, device="cuda"))
