"""How a step of the update is launched: the library's choice, what may be asked instead, both in numbers and in words.

Needs the library, not a GPU: the choice is a function of the sizes. Addresses are made up: nothing is read.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.made_up import view
from trtllm_replayssm.bench.cases import kernel_shapes
from trtllm_replayssm.errors import ContractError, UnsupportedError
from trtllm_replayssm.launches import UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype
from trtllm_replayssm.shapes import SsmKind, SsmShape

pytestmark = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")

ACT, F32, I32 = Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.INT32
SLOTS, MULTIPROCESSORS = 5, 132
SUPER, NANO, QWEN = (kernel_shapes()[name] for name in ("super120b", "nano4b", "qwen4b"))
PLAIN, DIRECT, STREAMED, PARTS = UpdateKernel


def update_args(
    shape: SsmShape, rows: int, tokens: int = 1, window: int = 16, *, narrow: bool = False,
    launch: UpdateLaunch | None = None,
) -> _abi.UpdateArgs:  # fmt: skip
    """narrow: float16 states, which are rounded stochastically."""
    h, g, p, n, ring = shape.heads, shape.groups, shape.head_dim, shape.state_dim, window + tokens
    gdn = shape.kind is SsmKind.GDN
    fields: dict[str, Any] = {name: view(I32, rows) for name in ("slot", "num_tokens")}
    fields |= {name: view(I32, SLOTS) for name in ("origin", "h")}
    fields |= {"value": view(ACT, rows, tokens, h, p), "out": view(ACT, rows, tokens, h, p)}
    fields |= {name: view(ACT, rows, tokens, g, n) for name in ("k", "q")}
    fields |= {name: view(F32, rows, tokens, h) for name in (("log_decay", "beta") if gdn else ("dt",))}
    fields |= {"checkpoint": view(Dtype.FLOAT16 if narrow else F32, SLOTS, h, p, n)}
    fields |= {"ring_value": view(Dtype.FLOAT16 if gdn else ACT, SLOTS, h, ring, p)}
    fields |= {"ring_k": view(ACT, SLOTS, g, ring, n), "ring_dt": view(F32, SLOTS, h, ring)}
    if gdn:
        fields |= {"ring_key_factor": view(F32, SLOTS, g, ring)}
    else:
        fields |= {"a": view(F32, h)}
    if narrow:
        fields |= {"seed": view(Dtype.INT64, SLOTS), "position": view(I32, SLOTS)}
    if narrow and gdn:
        fields |= {"ring_v": view(ACT, SLOTS, h, ring, p), "ring_beta": view(F32, SLOTS, h, ring)}
    constants = _abi.LaunchConstants(*([] if launch is None else launch.numbers))
    kind = int(_abi.Kind.GDN if gdn else _abi.Kind.MAMBA2)
    return _abi.UpdateArgs(kind=kind, window=window, launch=constants, **fields)


def text(library: _abi.Library, shape: SsmShape, rows: int, **options: Any) -> str:
    return library.update_launch_text(update_args(shape, rows, **options), MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("shape", "rows", "options", "expected"),
    [
        (SUPER, 1, {}, "plain: 128 CTAs of 256 threads and"),
        (SUPER, 4, {}, "direct: 512 CTAs of 128 threads and"),
        (SUPER, 1, {"tokens": 2}, "direct: 128 CTAs of 128 threads and"),
        (SUPER, 256, {}, "6 stages, 264 workers: 26 rounds of 4 heads, 2524 pieces of 2 heads, 264 of single heads"),
        (SUPER, 256, {"tokens": 4}, "26 rounds of 4 heads, 1262 pieces of 4 heads, 264 of single heads"),
        (NANO, 256, {}, "19 rounds of 4 heads, 2124 pieces of 2 heads, 264 of single heads"),
        (NANO, 256, {"tokens": 4}, "5 rounds of 12 heads, 4236 pieces of 2 heads, 264 of single heads"),
        (SUPER, 256, {"narrow": True}, "parts: 264 CTAs of 128 threads and"),
        (SUPER, 256, {"narrow": True, "tokens": 2}, "parts: 2048 CTAs of 128 threads and"),
        (QWEN, 1, {}, "plain: 64 CTAs of 128 threads and 10576 bytes"),
        (QWEN, 8, {}, "plain: 512 CTAs of 128 threads and"),
        (QWEN, 64, {}, "plain: 4096 CTAs of 128 threads and"),
        (QWEN, 8, {"tokens": 2}, "direct: 512 CTAs of 160 threads and"),
        (QWEN, 256, {}, "132 workers: 23 rounds of 2 heads, 994 pieces of 2 heads, 132 of single heads"),
        (SUPER, 0, {}, "nothing to launch"),
    ],
)  # fmt: skip
def test_the_librarys_choice_in_words(
    library: _abi.Library, shape: SsmShape, rows: int, options: dict[str, Any], expected: str
) -> None:
    assert expected in text(library, shape, rows, **options)


@pytest.mark.parametrize("kernel", [PLAIN, DIRECT, STREAMED])
@pytest.mark.parametrize("shape", [SUPER, QWEN], ids=["mamba2", "gdn"])
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_a_kernel_may_be_asked_for_at_any_batch(
    library: _abi.Library, shape: SsmShape, rows: int, kernel: UpdateKernel
) -> None:
    args = update_args(shape, rows, launch=UpdateLaunch(kernel=kernel))
    plan = library.update_launch_plan(args, MULTIPROCESSORS)
    assert plan.kernel == kernel
    items = rows * shape.heads
    if kernel is STREAMED:
        assert plan.ctas == min(items, MULTIPROCESSORS)
        dealt = plan.workers * plan.rounds * plan.run_heads
        assert dealt + (plan.pieces - plan.single_heads) * plan.piece_heads + plan.single_heads == items
    else:
        assert plan.ctas % items == 0


def test_what_is_asked_of_a_streamed_launch_is_what_it_gets(library: _abi.Library) -> None:
    launch = UpdateLaunch(kernel=STREAMED, multiprocessors=100, run_heads=8, piece_heads=4, drawn_rounds=3)
    plan = library.update_launch_plan(update_args(SUPER, 256, launch=launch), MULTIPROCESSORS)
    rounds = 256 * 128 // 8 // 200 - 3
    assert (plan.ctas, plan.workers, plan.run_heads, plan.piece_heads, plan.rounds) == (100, 200, 8, 4, rounds)
    rest = 256 * 128 - rounds * 200 * 8
    assert plan.single_heads == 200 and plan.pieces == 200 + (rest - 200) // 4


def test_runs_of_one_head_are_drawn_one_by_one_unless_asked(library: _abi.Library) -> None:
    launch = UpdateLaunch(kernel=STREAMED, run_heads=1)
    plan = library.update_launch_plan(update_args(SUPER, 256, launch=launch), MULTIPROCESSORS)
    assert (plan.run_heads, plan.piece_heads, plan.single_heads) == (1, 1, 0)


def test_what_is_asked_of_parts_is_what_it_gets(library: _abi.Library) -> None:
    for heads, stages in ((4, 1), (8, 2), (16, 1)):
        launch = UpdateLaunch(kernel=PARTS, piece_heads=heads, stages=stages)
        args = update_args(SUPER, 256, 2, narrow=True, launch=launch)
        plan = library.update_launch_plan(args, MULTIPROCESSORS)
        assert (plan.piece_heads, plan.stages, plan.ctas) == (heads, stages, 256 * 128 // heads)


@pytest.mark.parametrize(("rows", "ctas"), [(1, 32), (8, 256), (256, 264), (9000, 300)])
def test_ctas_of_plain_decoding_stay_and_share_the_heads(library: _abi.Library, rows: int, ctas: int) -> None:
    """As many as have room; fewer where warps would have less than a head, more where one would have too many rows."""
    launch = UpdateLaunch(kernel=PARTS, stages=1)
    plan = library.update_launch_plan(update_args(SUPER, rows, narrow=True, launch=launch), MULTIPROCESSORS)
    assert (plan.ctas, plan.stages) == (ctas, 1)


def test_parts_of_a_large_batch_are_of_as_many_groups_as_there_are_warps(library: _abi.Library) -> None:
    """Of the gated delta rule, for one token: fewer groups where multiprocessors would be left without a part; CTAs
    that stay."""
    for rows, heads, ctas in ((256, 16, 2 * MULTIPROCESSORS), (128, 16, 256), (64, 8, 256), (8, 2, 128)):
        plan = library.update_launch_plan(update_args(QWEN, rows, narrow=True), MULTIPROCESSORS)
        assert (plan.piece_heads, plan.ctas) == (heads, ctas)
    launch = UpdateLaunch(kernel=PARTS, piece_heads=4)
    plan = library.update_launch_plan(update_args(QWEN, 8, narrow=True, launch=launch), MULTIPROCESSORS)
    assert (plan.piece_heads, plan.ctas) == (4, 8 * QWEN.heads // 4)
    with pytest.raises(ContractError, match="piece_heads 2 4 8 16, stages 1 2"):
        text(library, QWEN, 8, narrow=True, launch=UpdateLaunch(kernel=PARTS, piece_heads=32))


REFUSED: list[tuple[str, SsmShape, int, dict[str, Any], UpdateLaunch]] = [
    ("more multiprocessors", SUPER, 64, {}, UpdateLaunch(kernel=STREAMED, multiprocessors=133)),
    ("runs across groups", SUPER, 64, {}, UpdateLaunch(kernel=STREAMED, run_heads=12)),
    ("pieces across runs", SUPER, 256, {}, UpdateLaunch(kernel=STREAMED, run_heads=4, piece_heads=8)),
    ("pieces across groups", SUPER, 2, {}, UpdateLaunch(kernel=STREAMED, piece_heads=3)),
    ("more rounds than there are", SUPER, 256, {}, UpdateLaunch(kernel=STREAMED, drawn_rounds=32)),
    ("a number without its kernel", SUPER, 64, {}, UpdateLaunch(kernel=DIRECT, run_heads=4)),
    ("a number of another kernel", SUPER, 64, {}, UpdateLaunch(kernel=STREAMED, stages=1)),
    ("plain with drafts", SUPER, 1, {"tokens": 2}, UpdateLaunch(kernel=PLAIN)),
    ("parts of float32", SUPER, 64, {}, UpdateLaunch(kernel=PARTS)),
    ("streamed float16", SUPER, 64, {"narrow": True}, UpdateLaunch(kernel=STREAMED)),
    ("odd parts", SUPER, 64, {"narrow": True}, UpdateLaunch(kernel=PARTS, piece_heads=5)),
    ("stages", SUPER, 64, {"narrow": True}, UpdateLaunch(kernel=PARTS, stages=3)),
]


@pytest.mark.parametrize(("shape", "rows", "options", "launch"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_cannot_be_launched_is_refused_with_what_can(
    library: _abi.Library, shape: SsmShape, rows: int, options: dict[str, Any], launch: UpdateLaunch
) -> None:
    """In words that name every allowed kernel and number, and what was asked."""
    with pytest.raises(ContractError) as found:
        text(library, shape, rows, launch=launch, **options)
    error = found.value
    assert error.argument == "launch" and "0 (the library's choice)" in str(error.expected)
    assert f"kernel {int(launch.kernel)} " in str(error.got) and f"stages {launch.stages}" in str(error.got)
    allowed = {PARTS} if options.get("narrow") else {DIRECT, STREAMED, *([] if options.get("tokens") else [PLAIN])}
    for kernel in UpdateKernel:
        assert (f"kernel {int(kernel)} ({kernel.name.lower()}" in str(error.expected)) == (kernel in allowed)
    if options.get("narrow"):
        assert "piece_heads 4 8 12 16, stages 1 2)" in str(error.expected)
    else:
        assert "multiprocessors 1..132" in str(error.expected) and "divide 16" in str(error.expected)


@pytest.mark.parametrize("numbers", [(0, 0, 4), (0, 0, 0, 2), (0, 0, 0, 0, 3), (0, 8)])
def test_numbers_without_their_kernel_are_refused_as_such(library: _abi.Library, numbers: tuple[int, ...]) -> None:
    """Their order: kernel, multiprocessors, heads of a run, of a piece, drawn rounds."""
    args = update_args(SUPER, 256)
    args.launch = _abi.LaunchConstants(*numbers)
    with pytest.raises(ContractError) as found:
        library.update_launch_plan(args, MULTIPROCESSORS)
    assert str(found.value.expected).startswith("numbers only beside their kernel; 0 (the library's choice)")


def test_negative_numbers_and_unknown_kernels_are_refused(library: _abi.Library) -> None:
    for numbers in ((3, -1), (3, 0, -4), (-1,), (5,), (0, 4)):
        args = update_args(SUPER, 64)
        args.launch = _abi.LaunchConstants(*numbers)
        with pytest.raises(ContractError, match="launch"):
            library.update_launch_plan(args, MULTIPROCESSORS)


def test_a_problem_that_no_kernel_serves_is_refused_as_such(library: _abi.Library) -> None:
    odd = ssm_shape(SsmKind.MAMBA2, heads=8, groups=2, head_dim=16, state_dim=128)
    for launch in (None, UpdateLaunch(kernel=DIRECT)):
        with pytest.raises(UnsupportedError, match="no kernel for bfloat16, d_v 16"):
            text(library, odd, 4, launch=launch)


def test_the_skipping_update_takes_no_launch(library: _abi.Library) -> None:
    args = _abi.DecaySkipArgs(update=update_args(SUPER, 8, launch=UpdateLaunch(kernel=DIRECT)), skip_below=1e-3)
    with pytest.raises(UnsupportedError, match=r"update\.launch: expected zeros"):
        library.decay_skip_update(args, 0, 0, 0)
