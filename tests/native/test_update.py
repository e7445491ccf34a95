"""The native update of both families and the commit against the specification, step by step (see twin.py)."""

from __future__ import annotations

import ctypes

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.twin import Twin, torch_module
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import CapacityError, ContractError, UnsupportedError
from trtllm_replayssm.launches import UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

# Family and d_v of the built kernels.
KERNELS = [
    pytest.param(SsmKind.MAMBA2, 64, id="mamba2-64"),
    pytest.param(SsmKind.MAMBA2, 80, id="mamba2-80"),
    pytest.param(SsmKind.GDN, 128, id="gdn-128"),
]
# Kernel and padding rows: plain decoding of GDN has a kernel for few rows and one for more.
LAUNCHES = [
    pytest.param(UpdateLaunch(kernel=UpdateKernel.DIRECT), 0, id="direct"),
    pytest.param(UpdateLaunch(kernel=UpdateKernel.STREAMED), 150, id="streamed"),
    pytest.param(UpdateLaunch(kernel=UpdateKernel.PLAIN), 0, id="plain-few"),
    pytest.param(UpdateLaunch(kernel=UpdateKernel.PLAIN), 60, id="plain-many"),
]


def base_shape(kind: SsmKind = SsmKind.MAMBA2, head_dim: int = 64) -> SsmShape:
    return ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)


@pytest.mark.parametrize(("launch", "padding"), LAUNCHES)
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_plain_decoding_matches_the_specification_through_three_windows(
    library: _abi.Library, kind: SsmKind, head_dim: int, act: str, launch: UpdateLaunch, padding: int
) -> None:
    twin = Twin(library, base_shape(kind, head_dim), ReplayConfig(window=16), act, slots=5)
    twin.pool.launch = launch
    for slot, origin in ((0, 0), (2, 16), (4, 9)):
        twin.admit(slot, origin)
    for _ in range(50):
        idle = [-1] * padding
        twin.step([4, -1, 0, 2, *idle], [1] * (4 + padding), [1] * (4 + padding), tokens=1)


@pytest.mark.parametrize(("launch", "padding"), LAUNCHES)
@pytest.mark.parametrize("window", [1, 2, 3, 8, 16, 40, 64])
@pytest.mark.parametrize("tokens", [1, 2, 4, 6, 8, 9, 16])
@pytest.mark.parametrize(("kind", "head_dim"), [KERNELS[0], KERNELS[2]])
def test_random_steps_match_the_specification(
    library: _abi.Library, kind: SsmKind, head_dim: int, window: int, tokens: int, launch: UpdateLaunch, padding: int
) -> None:
    """Padding rows swell the batch, so that more than one worker and the kernels for large batches have their say."""
    if tokens > window:
        pytest.skip("T_max <= L")
    if tokens > 1 and launch.kernel is UpdateKernel.PLAIN:
        pytest.skip("one token a row")
    config = ReplayConfig(window=window, max_step_tokens=tokens)
    twin = Twin(library, base_shape(kind, head_dim), config, "bfloat16", slots=6)
    twin.pool.launch = launch
    for slot in (0, 1, 3, 5):
        twin.admit(slot, origin=(slot * 7) % twin.config.ring_rows)
    for step in range(24):
        slots = [5, 0, -1, 3, 1]
        counts = [int(twin.rng.integers(0, tokens + 1)) for _ in slots]
        counts[step % 5] = tokens
        accepted = [int(twin.rng.integers(0, count + 1)) for count in counts]
        if step % 4 == 0:
            accepted = counts
        idle = [-1] * padding
        twin.step(slots + idle, counts + [tokens] * padding, accepted + idle, tokens)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("accept_all", [True, False])
def test_the_step_at_the_window_border(library: _abi.Library, offset: int, accept_all: bool) -> None:
    """h + T = L - 1, L and L + 1, then a plain step and an idle one."""
    window, tokens = 16, 6
    twin = Twin(library, base_shape(), ReplayConfig(window=window, max_step_tokens=tokens), "bfloat16", slots=2)
    twin.admit(1, origin=20)
    for _ in range(window - tokens + offset):
        twin.step([1], [1], [1], tokens)
    twin.step([1], [tokens], [tokens if accept_all else 1], tokens)
    twin.step([1], [0], [0], tokens)
    twin.step([1], [1], [1], tokens)


@pytest.mark.parametrize("rows", [1, 40])
def test_wide_and_narrow_items_and_real_shapes(library: _abi.Library, rows: int) -> None:
    """The production head counts at both launch choices; accepted out of range is clamped."""
    shape = ssm_shape(SsmKind.MAMBA2, heads=128, groups=8, head_dim=64, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=3, max_step_tokens=2), "bfloat16", slots=rows + 1)
    for slot in range(1, rows + 1):
        twin.admit(slot, origin=slot % 5)
    for _ in range(4):
        twin.step(list(range(rows, 0, -1)), [2] * rows, [9 if row % 2 else 2 for row in range(rows)], tokens=2)


def test_all_decay_gone_stays_finite(library: _abi.Library) -> None:
    twin = Twin(library, base_shape(), ReplayConfig(window=4, max_step_tokens=4), "bfloat16", slots=1)
    twin.a[:] = -1e30
    twin.admit(0)
    for _ in range(3):
        twin.step([0], [4], [3], tokens=4)


@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_hundred_identical_flushes_give_one_hash(library: _abi.Library, kind: SsmKind, head_dim: int) -> None:
    torch = torch_module()
    config = ReplayConfig(window=8, max_step_tokens=4)
    twin = Twin(library, base_shape(kind, head_dim), config, "bfloat16", slots=99)
    for slot in range(99):
        twin.admit(slot)
    slots = list(range(99))
    for _ in range(2):
        twin.step(slots, [4] * 99, [4] * 99, tokens=4)
    saved = {n: t.clone() for n, t in twin.pool.tensors.items()}
    rows = twin.make_rows(slots, [4] * 99, 4)
    hashes = set()
    for _ in range(100):
        for name, tensor in saved.items():
            twin.pool.tensors[name].copy_(tensor)
        out = torch.full((99, 4, 8, head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        twin.pool.update(rows, out)
        state = twin.pool.tensors["checkpoint"].view(torch.int32).long()
        weights = torch.arange(1, state.numel() + 1, device="cuda").view_as(state)
        hashes.add((int((state * weights).sum()), int((out.view(torch.int16).long() * weights.view(-1)[: out.numel()]
                                                       .view_as(out)).sum())))  # fmt: skip
    assert len(hashes) == 1


def test_graph_replay_follows_the_cursors(library: _abi.Library) -> None:
    """Update and commit captured once, replayed across two flushes with fresh inputs each time."""
    torch = torch_module()
    eager = Twin(library, base_shape(), ReplayConfig(window=4), "bfloat16", slots=2)
    eager.admit(0)
    replayed = Twin(library, base_shape(), ReplayConfig(window=4), "bfloat16", slots=2)
    replayed.admit(0)
    static = replayed.make_rows([0], [1], 1)
    out = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for flags in (0, _abi.UPDATE_PROGRAMMATIC_LAUNCH):
            replayed.pool.update(static, out, flags)
            replayed.pool.commit(static["slot"], static["num_tokens"], one)
    for _ in range(6):
        rows = eager.make_rows([0], [1], 1)
        for name in ("value", "k", "q", "dt"):
            static[name].copy_(rows[name])
        graph.replay()
        expected = torch.zeros_like(out)
        for _ in range(2):
            eager.pool.update(rows, expected)
            eager.pool.commit(rows["slot"], rows["num_tokens"], one)
        torch.cuda.synchronize()
        assert (out == expected).all()
    for name, tensor in eager.pool.tensors.items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(replayed.pool.tensors[name])), name


def test_pools_beyond_two_to_the_32_bytes_and_elements(library: _abi.Library) -> None:
    """The last slot of a pool of more than 2^32 elements; slot 0 keeps its bits."""
    shape = ssm_shape(SsmKind.MAMBA2, heads=128, groups=8, head_dim=64, state_dim=128)
    slots = 2**32 // shape.state_elems + 2
    twin = Twin(library, shape, ReplayConfig(window=2, max_step_tokens=2), "bfloat16", slots=1)
    del twin.pool
    twin.pool = harness.Pool(shape, twin.config, slots, twin.dtype, library)
    twin.admit(0)
    twin.admit(slots - 1)
    first = twin.pool.tensors["checkpoint"][0].clone()
    rows_step = [slots - 1]
    twin.check_untouched = lambda *_: None  # type: ignore[method-assign]
    for _ in range(3):
        twin.step(rows_step, [2], [2], tokens=2)
    assert (twin.pool.tensors["checkpoint"][0] == first).all()


def test_wrong_calls_are_named_before_any_launch(library: _abi.Library) -> None:
    torch = torch_module()
    twin = Twin(library, base_shape(), ReplayConfig(window=16, max_step_tokens=2), "bfloat16", slots=2)
    rows = twin.make_rows([0], [2], 2)
    out = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ContractError, match="q: expected"):
        twin.pool.update({**rows, "q": rows["q"][:, :, :1]}, out)
    with pytest.raises(ContractError, match="out: expected"):
        twin.pool.update(rows, torch.zeros(1, 2, 8, 72, dtype=torch.bfloat16, device="cuda")[..., 4:68])
    with pytest.raises(ContractError, match="dt: expected float32"):
        twin.pool.update({**rows, "dt": rows["dt"].double().half()}, out)
    with pytest.raises(ContractError, match="C >= window"):
        twin.pool.update(twin.make_rows([0], [3], 3), torch.zeros(1, 3, 8, 64, dtype=torch.bfloat16, device="cuda"))
    with pytest.raises(UnsupportedError, match="built are"):
        narrow = Twin(library, ssm_shape(SsmKind.MAMBA2, 8, 2, 16, 128), twin.config, "bfloat16", slots=1)
        narrow.pool.update(narrow.make_rows([0], [2], 2), torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16, device="cuda"))
    args = _abi.UpdateArgs()
    record = _abi.ErrorRecord()
    assert library._handle.rssm_update(ctypes.byref(args), None, None, None, ctypes.byref(record)) == 4
    assert b"struct_size" in record.message
    twin.pool.workspace = twin.pool.workspace[:0]
    with pytest.raises(CapacityError, match="workspace"):
        twin.pool.update(rows, out)


def test_empty_batches_do_nothing(library: _abi.Library) -> None:
    torch = torch_module()
    twin = Twin(library, base_shape(), ReplayConfig(window=4), "bfloat16", slots=1)
    rows = twin.make_rows([], [], 1)
    twin.pool.update(rows, torch.zeros(0, 1, 8, 64, dtype=torch.bfloat16, device="cuda"))
    twin.pool.commit(rows["slot"], rows["num_tokens"], rows["num_tokens"])
