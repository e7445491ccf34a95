"""The step benchmark's pure parts: how rows accept, where sequences stand, the byte floor, names of kernels, ratios."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.rooms import ROOT
from trtllm_replayssm.bench.step.breakdown import OTHER, PARTS, add_up, alone, part_of
from trtllm_replayssm.bench.step.cases import Schedule, StepCase, acceptance_table, spread_records
from trtllm_replayssm.bench.step.floor import StepFloor, slot_state_bytes, step_floor
from trtllm_replayssm.bench.step.report import line, ratios
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.spec.cursors import flushes
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.presets import preset_geometry, preset_names, slice_geometry
from trtllm_replayssm.weights.sizes import StepParameter

PLAIN, DRAFTED = ReplayConfig(window=16), ReplayConfig(window=16, max_step_tokens=4)


def case(cache: str = "replay", rows: int = 256, tokens: int = 1, **changes: object) -> StepCase:
    base = StepCase(
        cache=cache, rows=rows, tokens=tokens, accepted=1.0 if tokens == 1 else 3.4, context=512,
        replay=PLAIN if tokens == 1 else DRAFTED,
    )  # fmt: skip
    return replace(base, **changes)


@given(hundredths=st.integers(100, 800), rows=st.integers(1, 40))
def test_forced_acceptance_has_its_mean_for_every_row(hundredths: int, rows: int) -> None:
    table = acceptance_table(hundredths / 100, rows)
    assert all(sum(column) * 100 == hundredths * len(table) for column in zip(*table, strict=True))
    assert {a for row in table for a in row} <= {hundredths // 100, -(-hundredths // 100)}


def test_rows_do_not_accept_in_step() -> None:
    table = acceptance_table(3.4, 5)
    assert len(table) == 5 and all(sorted(row) == [3, 3, 3, 4, 4] for row in table)


@pytest.mark.parametrize("replay", [PLAIN, DRAFTED])
def test_rows_begin_at_all_places_of_their_windows(replay: ReplayConfig) -> None:
    records = spread_records(replay, replay.max_step_tokens, 64)
    assert min(records) == 0
    assert not flushes(replay, max(records), replay.max_step_tokens)
    assert flushes(replay, max(records) + 1, replay.max_step_tokens)


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_timed_steps_lie_around_the_context(tokens: int) -> None:
    schedule, one = Schedule(warm_up=16, block=16, rounds=5), case(tokens=tokens)
    first = schedule.first_position(one)
    assert abs(first + one.accepted * (16 + 40) - 512) <= 1
    assert schedule.last_position(one) >= first + one.accepted * (16 + 80 + 16) + tokens


def test_a_context_too_short_for_the_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="context"):
        Schedule(warm_up=16, block=16, rounds=100).first_position(case())


@pytest.mark.parametrize(
    "changes", [{"cache": "none"}, {"rows": 0}, {"tokens": 2}, {"accepted": 0.5}, {"tokens": 4, "replay": DRAFTED,
                                                                                  "accepted": 4.5}]
)  # fmt: skip
def test_a_case_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        case(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", preset_names())
def test_the_floor_of_states_agrees_with_the_published_traffic(preset: str) -> None:
    """Plain: conventional reads and writes every state, replay reads it and writes one in sixteen, with its records."""
    geometry = slice_geometry(preset_geometry(preset), None, mtp=False)
    state = 4 * geometry.ssm.state_elems * len(geometry.ssm_layers) * 256
    conventional, replay = (
        step_floor(geometry, lambda _: MatrixFormat.BF16, case(cache), 2) for cache in ("conventional", "replay")
    )
    assert conventional.states == 2 * state
    assert 1.7 < conventional.states / replay.states < 1.9
    assert conventional.weights == replay.weights and conventional.kv == replay.kv
    assert conventional.logits == 256 * geometry.vocab * 4


@pytest.mark.parametrize("preset", preset_names())
def test_a_drafting_slot_holds_a_quarter_of_the_state(preset: str) -> None:
    geometry = preset_geometry(preset)
    conventional, replay = (
        slot_state_bytes(geometry, case(cache, tokens=4), ActivationDtype.BFLOAT16)
        for cache in ("conventional", "replay")
    )
    assert 3.4 <= conventional / replay < 4.0


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void replayssm::streamedUpdateKernel<replayssm::Mamba2<80>>", "SSM"),
        ("void replayssm::conventionalKernel<4>", "SSM"), ("void replayssm::ssmInputsKernel<8>", "convolution"),
        ("void replayssm::groupedKernel<Nvfp4>(int)", "experts"),
        ("void replayssm::deepKernel<Nvfp4>(int)", "experts"), ("replayssm::planKernel(Plan)", "experts"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", OTHER),
        ("void replayssm::skippingDirectKernel<4>", "SSM"), ("void replayssm::mergeKernel<128>(int)", "attention"),
        ("void replayssm::wideAttentionKernel<128>(int)", "attention"),
        ("void replayssm::attentionInputsKernel<16>(int)", "attention"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", OTHER),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "GEMM"), ("void cutlass::Kernel2<cutlass_80_tensorop>", "GEMM"),
        ("void replayssm::anyGatedNormKernel<4>", OTHER), ("Memcpy DtoD (Device -> Device)", OTHER),
    ],
)  # fmt: skip
def test_kernels_have_their_part(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
    assert add_up([(kernel, 30.0), (kernel, 10.0)], 4) == {p: 10.0 if p == part else 0.0 for p in PARTS}


def test_a_kernel_that_waits_for_another_gets_its_own_time_only() -> None:
    """b begins during a and ends after it; c lies within b; d begins after a gap."""
    kernels = [("b", 4.0, 15.0), ("a", 0.0, 10.0), ("c", 11.0, 12.0), ("d", 20.0, 23.0)]
    assert alone(kernels) == [("a", 10.0), ("b", 5.0), ("c", 0.0), ("d", 3.0)]


def row(cache: str, rows: int, tokens: int, us: float, role: str = "equal", state: int = 100) -> dict[str, object]:
    accepted = 1.0 if tokens == 1 else 3.4
    return {
        "what": "step", "model": "m", "layers": "all", "cache": cache, "role": role, "B": rows, "T": tokens, "L": 16,
        "accepted": accepted, "context": 512, "us": us, "us_quartiles": [us, us], "floor_us": us / 2,
        "bound_us": us * 0.75, "percent_of_bound": 75.0, "shape_bound_us": us * 0.9, "percent_of_shape_bound": 90.0,
        "tokens_per_s": rows * accepted / us * 1e6, "state_bytes_per_slot": state, "percent_of_floor": 50.0,
        "breakdown_us": {"SSM": us},
    }  # fmt: skip


def test_ratios_compare_what_belongs_together() -> None:
    rows = [
        row("conventional", 256, 1, 15.0), row("replay", 256, 1, 10.0), row("conventional", 256, 4, 40.0, state=400),
        row("replay", 256, 4, 20.0), row("conventional", 300, 4, 50.0, "largest", state=400),
        row("replay", 1200, 4, 100.0, "largest"), row("replay", 32, 1, 5.0),
    ]  # fmt: skip
    found = {(r["row"], r["B"], r["T"]): r["ratio"] for r in ratios(rows)}
    assert found == {
        ("plain", 256, 1): 1.5, ("slot bytes, conventional over replay", 256, 1): 1.0,
        ("speculative", 256, 4): 2.0, ("slot bytes, conventional over replay", 256, 4): 4.0,
        ("speculative replay over plain conventional", 256, 4): round(15 * 3.4 / 20, 3),
        ("speculative, largest batch", 1200, 4): 2.0, ("slot bytes, conventional over replay", 1200, 4): 4.0,
    }  # fmt: skip
    assert all("nan" not in line(r) for r in [*rows, *ratios(rows)])


def test_the_bound_takes_the_longer_of_products_and_weights_for_each_matrix() -> None:
    """Weights of 60 and 40 bytes at 10 bytes a second, and 50 other bytes; the second is multiplied with 10 times."""
    floor = StepFloor(weights=100.0, states=40.0, windows=5.0, kv=4.0, logits=1.0)
    spec = ParamSpec(name="any", shape=(1,), role=ParamRole.VECTOR)
    parameters = [StepParameter(spec, 60.0, 0.0), StepParameter(spec, 40.0, 10.0)]
    assert floor.bound(parameters, 10.0, 1e9) == pytest.approx(15.0)  # bytes alone
    assert floor.bound(parameters, 10.0, 2.0) == pytest.approx(6.0 + 10.0 + 5.0)  # 20 operations of the second


@pytest.mark.parametrize(
    "room", ["replay_update", "weighed_update", "plain_update", "narrow_update", "decay_skip", "conventional"]
)
def test_every_kernel_of_a_recurrence_counts_as_one(room: str) -> None:
    """What `__global__` functions of these folders are called, with the launch bounds between."""
    names: list[str] = []
    for path in sorted((ROOT / "plugins" / "kernels" / room).glob("*.cu*")):
        names += re.findall(r"__global__[^;{]*?\b(\w+Kernel)\(", path.read_text(encoding="utf-8"))
    recovered = [name for name in names if name.startswith("recovery")]  # baselines of bench kernel, in no step
    assert names and [name for name in names if part_of(name) != "SSM"] == recovered
