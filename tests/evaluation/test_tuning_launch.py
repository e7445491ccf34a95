"""`tune`: which launches are measured, by what, which one is taken, the file, and the session that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.native import harness
from tests.native.test_update_launch import MULTIPROCESSORS, QWEN, SUPER, update_args
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm import LLM
from trtllm_replayssm.bench import launch_timing, machine
from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.launch_candidates import Candidate, candidates
from trtllm_replayssm.bench.launch_timing import choose_launch, measure
from trtllm_replayssm.bench.problem import LaunchMode
from trtllm_replayssm.bench.timing import Timing
from trtllm_replayssm.cli import main
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError, ContractError
from trtllm_replayssm.launches import LaunchPlan, TunedLaunch, UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi, native_library
from trtllm_replayssm.runtime import replica
from trtllm_replayssm.runtime.tuning import VARIABLE, add_entry, read_tune_file, tune_key, with_tuned
from trtllm_replayssm.shapes import SsmShape

needs_library = pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")
STREAMED = UpdateKernel.STREAMED
RUNS = UpdateLaunch(kernel=STREAMED, run_heads=8, piece_heads=2)


def case(shape: SsmShape, rows: int, tokens: int = 1, recurrence: StateFormat = StateFormat.FLOAT32) -> KernelCase:
    return KernelCase(
        shape_name="any", shape=shape, suite="tune", operation=Operation.UPDATE, rows=rows, tokens=tokens, window=16,
        recurrence=recurrence, read=None,
    )  # fmt: skip


def planner(shape: SsmShape, rows: int, tokens: int = 1, narrow: bool = False) -> Callable[..., LaunchPlan]:
    library = _abi.Library(harness.LIBRARY)

    def plan(launch: UpdateLaunch | None) -> LaunchPlan:
        args = update_args(shape, rows, tokens, narrow=narrow, launch=launch)
        return library.update_launch_plan(args, MULTIPROCESSORS)

    return plan


@needs_library
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rows", [1, 8, 256])
@pytest.mark.parametrize("shape", [SUPER, QWEN], ids=["super120b", "qwen4b"])
def test_candidates_are_the_librarys_choice_and_what_it_accepts(shape: SsmShape, rows: int, tokens: int) -> None:
    plan = planner(shape, rows, tokens)
    found = candidates(case(shape, rows, tokens), plan, MULTIPROCESSORS)
    assert found[0].launch is None and found[0].plan == plan(None)
    assert all(c.launch is not None and plan(c.launch) == c.plan for c in found[1:])
    assert len({c.plan for c in found}) == len(found) <= 17, "one launch is measured once"
    kernels = {c.plan.kernel for c in found}
    assert kernels == {UpdateKernel.DIRECT, STREAMED} | ({UpdateKernel.PLAIN} if tokens == 1 else set())
    assert all(c.waves >= 1.0 - 1e-9 for c in found), "the busiest multiprocessor has no less than the mean"


@needs_library
def test_candidates_of_narrow_states_differ_in_parts_and_stages() -> None:
    narrow = case(SUPER, 256, recurrence=StateFormat.FLOAT16)
    found = candidates(narrow, planner(SUPER, 256, narrow=True), MULTIPROCESSORS)
    assert {c.plan.kernel for c in found} == {int(UpdateKernel.PARTS)}
    assert {(c.plan.piece_heads, c.plan.stages) for c in found} == {(h, s) for h in (4, 8, 12, 16) for s in (1, 2)}


@needs_library
def test_the_model_prefers_what_spreads_evenly_and_loads_keys_once() -> None:
    """256 rows: large runs share a group's keys; 132 multiprocessors are used better than 124."""
    everything = candidates(case(SUPER, 256), planner(SUPER, 256), MULTIPROCESSORS, most=1000)
    by_name = {c.name: c for c in everything}
    fewer = by_name["streamed multiprocessors 124"]
    assert fewer.waves == pytest.approx(132 / 124, rel=0.01) and everything[0].waves < 1.01
    one = next(c for c in everything if c.plan.run_heads == 1 and c.plan.ctas == MULTIPROCESSORS)
    keys = (8 + 2 * 1) * SUPER.state_dim * 2  # bytes of a group: a half-full window, and this step's k and q
    assert one.bytes - case(SUPER, 256).floor_bytes(8) == 256 * (SUPER.heads - SUPER.groups) * keys, "for each head"
    assert one.bytes > 1.02 * everything[0].bytes and one.cost > everything[0].cost
    fewest = candidates(case(SUPER, 256), planner(SUPER, 256), MULTIPROCESSORS, most=6)
    assert [c.name for c in fewest[1:5]] == ["plain", "direct", *(f"streamed multiprocessors {n}" for n in (124, 116))]
    assert len(fewest) == 7 and max(c.cost for c in fewest[5:]) <= min(c.cost for c in everything if c not in fewest)


def made(launch: UpdateLaunch | None, ctas: int) -> Candidate:
    plan = LaunchPlan(
        kernel=2, ctas=ctas, threads=128, shared_bytes=0, stages=1, workers=0, rounds=0, run_heads=0, pieces=0,
        piece_heads=0, single_heads=0,
    )  # fmt: skip
    return Candidate(launch=launch, plan=plan, bytes=1000, waves=1.0)


CANDIDATES = [made(None, 1), made(UpdateLaunch(kernel=UpdateKernel.DIRECT), 2), made(RUNS, 3)]


def run_measure(us: dict[UpdateLaunch | None, dict[int, float]], red: Sequence[UpdateLaunch | None] = ()) -> Any:
    """`measure` over a timer that calls each work once and takes the time from what it enqueued."""
    enqueued: list[tuple[UpdateLaunch | None, int]] = []

    def timer(work: Sequence[tuple[Callable[[], None], int]], rounds: int) -> list[Timing]:
        assert rounds > 0 and {launches for _, launches in work} == {12}
        times = []
        for enqueue, _ in work:
            enqueue()
            launch, h = enqueued[-1]
            times.append(Timing(us[launch][h], 0.0, 0.0))
        return times

    return measure(
        CANDIDATES, [1, 2, 2, 3], lambda launch: launch not in red, lambda launch, h: enqueued.append((launch, h)), 12,
        timer,
    )  # fmt: skip


def test_times_are_means_over_the_cycle_and_the_fastest_is_taken() -> None:
    flat = {1: 10.0, 2: 10.0, 3: 10.0}
    own, runs = {1: 8.0, 2: 10.0, 3: 12.0}, {1: 1.0, 2: 9.0, 3: 9.0}
    measured = run_measure({None: own, CANDIDATES[1].launch: flat, RUNS: runs})
    assert [m.us for m in measured] == [10.0, 10.0, 7.0], "h = 2 occurs twice in the cycle"
    choice = choose_launch(measured)
    assert choice.launch == RUNS and "7.00 us" in choice.why[-1] and "10.00 us" in choice.why[-1]
    assert len(choice.why) == 4 and "streamed run_heads 8 piece_heads 2: 0.0 MB, waves 1.000" in choice.why[2]


def test_a_red_gate_is_never_taken_and_noise_keeps_the_librarys_choice() -> None:
    flat, fast, close = (dict.fromkeys((1, 2, 3), us) for us in (10.0, 5.0, 9.95))
    measured = run_measure({None: flat, RUNS: close}, red=[CANDIDATES[1].launch])
    assert measured[1].us is None
    choice = choose_launch(measured)
    assert choice.launch is None and "red" in choice.why[1] and "none is faster by 1%" in choice.why[-1]
    assert choose_launch(measured, close=0.001).launch == RUNS
    broken = choose_launch(run_measure({RUNS: fast, CANDIDATES[1].launch: fast}, red=[None]))
    assert broken.launch is None and "nothing counts" in broken.why[-1]


def test_a_launch_survives_the_file_and_serves_its_batch_at_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, config = tmp_path / "tune.json", ReplayConfig(max_step_tokens=4)
    direct = UpdateLaunch(kernel=UpdateKernel.DIRECT)
    for batch, window, launch in ((64, 12, RUNS), (8, 12, direct), (16, 9, direct), (32, 12, None)):
        entry = None if launch is None else launch.entry()
        add_entry(file, tune_key(SUPER, config, "gpu"), {"batch": batch, "window": window, "launch": entry})
    monkeypatch.setenv(VARIABLE, str(file))
    tuned = with_tuned(config, SUPER, "gpu", 60)
    assert tuned.window == 12 and [t.rows for t in tuned.launches] == [8, 64], "none of another window"
    assert tuned.launch(64, 4) == RUNS and tuned.launch(8, 4) == direct
    assert tuned.launch(63, 4) is tuned.launch(64, 1) is tuned.launch(16, 4) is None
    assert with_tuned(config, SUPER, "gpu", 16).launches == (TunedLaunch(rows=16, tokens=4, launch=direct),)


def test_launches_are_checked_where_they_are_made() -> None:
    with pytest.raises(ConfigError, match="run_heads"):
        UpdateLaunch(kernel=STREAMED, run_heads=-1)
    with pytest.raises(ConfigError, match="multiprocessors"):
        UpdateLaunch(kernel=STREAMED, multiprocessors=(1 << 32) + 4)  # 4 to a library whose numbers are int32
    with pytest.raises(ConfigError, match="rows"):
        TunedLaunch(rows=1 << 31, tokens=1, launch=RUNS)
    with pytest.raises(ConfigError, match="kernel"):
        UpdateLaunch(kernel=3)  # type: ignore[arg-type]
    for entry in ({}, {"kernel": ["direct"]}, {"kernel": "fast"}, {"kernel": "direct", "speed": 3}, None, [1]):
        with pytest.raises(ConfigError, match="kernel"):
            UpdateLaunch.of_entry(entry)
    assert UpdateLaunch.of_entry(RUNS.entry()) == RUNS and RUNS.numbers == [3, 0, 8, 2, 0, 0]
    with pytest.raises(ConfigError, match="launches"):
        ReplayConfig(launches=[TunedLaunch(rows=1, tokens=1, launch=RUNS)])  # type: ignore[arg-type]


class StandIn:
    """`Problem` without a device: its plans are the library's, its launches are noted."""

    device, launches = None, 12
    enqueued: ClassVar[list[tuple[UpdateLaunch | None, int, LaunchMode]]] = []

    def __init__(self, case: KernelCase, library: _abi.Library) -> None:
        self.case, self.native, self.launch = case, library, None

    def plan(self, multiprocessors: int) -> LaunchPlan:
        args = update_args(self.case.shape, self.case.rows, self.case.tokens, self.case.window, launch=self.launch)
        return self.native.update_launch_plan(args, multiprocessors)

    def enqueue(self, h: int, mode: LaunchMode) -> None:
        self.enqueued.append((self.launch, h, mode))


@needs_library
def test_measuring_writes_the_fastest_launch_of_the_kept_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with a device that is faster the fewer multiprocessors a streamed launch takes."""
    gated: list[Any] = []

    def gate(case: KernelCase, library: _abi.Library, rows: Sequence[int], launch: UpdateLaunch | None) -> Any:
        gated.append((rows, launch))
        return SimpleNamespace(green=launch is None or launch.kernel != UpdateKernel.DIRECT)

    def timer(work: Sequence[tuple[Callable[[], None], int]], rounds: int) -> list[Timing]:
        times = []
        for enqueue, _ in work:
            enqueue()
            launch, h, _ = StandIn.enqueued[-1]
            fewer = launch is not None and launch.multiprocessors == 116
            times.append(Timing(80.0 + h if fewer else 100.0 + h, 0.0, 0.0))
        return times

    StandIn.enqueued.clear()
    for name, stand_in in (("Problem", StandIn), ("run_gate", gate), ("time_cases", timer)):
        monkeypatch.setattr(launch_timing, name, stand_in)
    monkeypatch.setattr(
        launch_timing.torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS),
    )  # fmt: skip
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(native_library, "installed_library", lambda: _abi.Library(harness.LIBRARY))
    file = tmp_path / "tune.json"
    arguments = ["tune", "nemotron-3-super-120b-a12b-nvfp4", "--batch", "256", "--step-tokens", "4", "--accepted", "2"]
    assert main([*arguments, "--keep-window", "--window", "12", "--measure", "--file", str(file)]) == 0
    ((key, (entry,)),) = read_tune_file(file).items()
    assert key.endswith("T 4, float32, NVIDIA H200") and (entry["batch"], entry["window"]) == (256, 12)
    assert entry["launch"] == {"kernel": "streamed", "multiprocessors": 116}
    printed = capsys.readouterr().out
    assert "taken: streamed multiprocessors 116" in printed and "direct: " in printed and "gate is red" in printed
    assert all(rows == (256,) for rows, _ in gated) and len(gated) > 5
    assert {h for _, h, _ in StandIn.enqueued} == set(replace(case(SUPER, 256, 4), window=12).cycle(2))
    assert {mode for *_, mode in StandIn.enqueued} == {LaunchMode.SETTLED}
    assert UpdateLaunch(kernel=UpdateKernel.DIRECT) not in [launch for launch, *_ in StandIn.enqueued]


def test_on_a_cpu_the_launch_is_left_to_the_library_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = CHECKPOINTS / "nemotron-dense", tmp_path / "tune.json"
    assert main(["tune", str(model), "--batch", "4", "--keep-window", "--window", "11", "--file", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "L = 11, as given" in printed and "launch: left to the library" in printed
    (entries,) = read_tune_file(file).values()
    assert (entries[0]["window"], entries[0]["launch"]) == (11, None) and len(entries[0]["why"]) == 2


def test_a_session_takes_the_launches_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = CHECKPOINTS / "nemotron-dense", tmp_path / "tune.json"
    assert main(["tune", str(model), "--batch", "4", "--file", str(file)]) == 0
    ((key, (entry,)),) = read_tune_file(file).items()
    add_entry(file, key, {**entry, "launch": RUNS.entry()})
    monkeypatch.setenv(VARIABLE, str(file))
    with LLM(model, tokenizer=None, max_seq_len=32) as llm:
        replay = llm._engine.session.replay
        assert replay.launch(4, 1) == RUNS and replay.launch(2, 1) is None
        assert next(iter(llm._engine.session.pools.ssm.values())).config.launch(4, 1) == RUNS
    with LLM(model, tokenizer=None, max_seq_len=32, replay_config=ReplayConfig(window=9)) as llm:
        assert not llm._engine.session.replay.launches, "what is asked for stays"


def test_ranks_that_share_a_model_take_its_window_but_no_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch is measured with all of the model's heads; a rank has some of them."""
    model, file, taken = CHECKPOINTS / "nemotron-dense", tmp_path / "tune.json", []
    assert main(["tune", str(model), "--batch", "4", "--file", str(file)]) == 0
    ((key, (entry,)),) = read_tune_file(file).items()
    add_entry(file, key, {**entry, "launch": RUNS.entry()})
    monkeypatch.setenv(VARIABLE, str(file))

    def session(checkpoint: object, config: ReplayConfig, *rest: Any, **named: Any) -> None:
        taken.append(config)
        raise ConfigError("test", "session", expected="none", got="one")

    monkeypatch.setattr(replica, "checkpoint_session", session)
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match="test: session"):
            LLM(model, tokenizer=None, max_seq_len=32, tensor_parallel_size=ranks)
    assert [(c.window, c.launch(4, 1)) for c in taken] == [(entry["window"], RUNS), (entry["window"], None)]


def test_candidates_survive_a_library_that_refuses_everything_else() -> None:
    def plan(launch: UpdateLaunch | None) -> LaunchPlan:
        if launch is not None:
            raise ContractError("rssm_update_launch_plan", "launch", expected="0", got=launch)
        return CANDIDATES[0].plan

    (only,) = candidates(case(SUPER, 4), plan, MULTIPROCESSORS)
    assert only.launch is None
