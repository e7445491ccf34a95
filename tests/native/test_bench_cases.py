"""The benchmark's one list of cases: the C++ program and the package read the same cases and count the same bytes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.rooms import ROOT
from tests.native import harness
from tests.native.host_program import built
from trtllm_replayssm.bench import gate, run
from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_cases, suites
from trtllm_replayssm.bench.gate import GateResult
from trtllm_replayssm.bench.problem import LaunchMode
from trtllm_replayssm.bench.schemes import Scheme, SchemeProblem, scheme_gate
from trtllm_replayssm.bench.timing import Timing
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.ops import _abi

PROGRAM = r"""
#include <cstdio>
#include "bench/cases.h"
int main() {
  for (const Shape& s : case_list::kShapes)
    for (const Case& c : case_list::kCases) {
      std::printf("{\"case\": \"%s\"", caseName(s, c).c_str());
      for (int accepted : {1, c.tokens})
        for (int h : windowCycle(c, accepted))
          std::printf(", \"%d\": %lld", h, static_cast<long long>(floorBytes(s, c, h)));
      std::printf("}\n");
    }
}
"""


def test_both_benchmarks_have_the_same_cases_windows_and_bytes(tmp_path: Path) -> None:
    binary = built(tmp_path, PROGRAM, [ROOT / "plugins" / "include", ROOT / "trtllm_replayssm" / "bench"])
    printed = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()
    theirs = [json.loads(line) for line in printed]
    ours: list[dict[str, Any]] = []
    for case in kernel_cases():
        depths = {*case.cycle(1), *case.cycle(case.tokens)}
        ours.append({"case": case.name, **{str(h): case.floor_bytes(h) for h in depths}})
    assert theirs == ours


def test_every_case_is_a_valid_pool_and_named_once() -> None:
    names = [case.name for case in kernel_cases()]
    assert len(set(names)) == len(names) > 100
    assert {"plain", "verify", "few", "precision", "window", "prefill"} == set(suites())
    assert all(case.config.window >= case.config.max_step_tokens for case in kernel_cases())


def test_a_plain_window_flushes_once_and_a_verification_as_its_tokens_are_kept() -> None:
    plain = next(c for c in kernel_cases() if c.operation is Operation.UPDATE and c.tokens == 1 and c.window == 16)
    assert sorted(plain.cycle(1)) == list(range(1, 17))
    verify = replace(plain, tokens=8)
    assert verify.cycle(8) == [8, 16] or verify.cycle(8) == [16, 8]
    assert sorted(verify.cycle(1)) == list(range(1, 10))


class HostProblem:
    """What `_time` asks of a problem, on a host: its launches are counted by how many records rows have."""

    launches = 4

    def __init__(self, case: KernelCase, library: Any) -> None:
        self.asked: list[Any] = library

    def enqueue(self, h: Any, mode: Any) -> None:
        self.asked.append(h)


@pytest.mark.parametrize(("rows", "tokens", "staggered"), [(256, 1, [16]), (256, 4, [4, 13]), (8, 4, [4]), (1, 8, [])])
def test_rows_are_also_timed_at_all_places_of_their_windows(
    monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, staggered: list[int]
) -> None:
    """One launch for each way of accepting, where there are as many rows as places."""
    asked: list[Any] = []

    def on_host(timed: Any, rounds: int) -> list[Timing]:
        for enqueue, _ in timed:
            enqueue()
        return [Timing(float(number), 0.0, 0.0) for number, _ in enumerate(timed)]

    monkeypatch.setattr(run, "Problem", HostProblem)
    monkeypatch.setattr(run, "time_cases", on_host)
    plain = next(c for c in kernel_cases() if c.operation is Operation.UPDATE and c.tokens == 1 and c.window == 16)
    case = replace(plain, rows=rows, tokens=tokens)
    results = [r for r in run._time(case, asked, 4e12, 1) if r.mode is LaunchMode.SETTLED]  # type: ignore[arg-type]
    for result in results:
        cycle, fields = case.cycle(result.accepted), result.fields()
        assert ("staggered_us" in fields) == (len(cycle) in staggered)
        assert result.by_h.keys() == set(cycle) and (len(cycle) not in staggered or tuple(cycle) in asked)
    assert {len(h) for h in asked if isinstance(h, tuple)} == set(staggered)


def refused_and_timed(monkeypatch: pytest.MonkeyPatch, answer: GateResult | Exception) -> list[Any]:
    def fake_gate(case: KernelCase, library: Any) -> GateResult:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def timed(*_: Any) -> Any:
        raise AssertionError("timed without a green gate")

    monkeypatch.setattr(run, "run_gate", fake_gate)
    monkeypatch.setattr(run, "_time", timed)
    cases = [c for c in kernel_cases() if c.shape_name == "nano4b" and c.suite == "plain"]
    return list(run.run_cases(cases, None, 4e12, rounds=1))  # type: ignore[arg-type]


def test_a_red_gate_prints_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = refused_and_timed(monkeypatch, GateResult(output_error=1.0, output_share=2.0))
    gates = [row for row in rows if isinstance(row, tuple)]
    refusals = [row for row in rows if isinstance(row, run.Refusal)]
    assert len(gates) == 2 and len(refusals) == 12 == len(rows) - 2, "one gate a kernel, one refusal a batch size"
    assert all(row.reason == "the gate is red" for row in refusals)


def test_a_kernel_that_is_not_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = UnsupportedError("rssm_update", "value", expected="success", got="no kernel for d_v 7")
    rows = refused_and_timed(monkeypatch, error)
    assert all(isinstance(row, run.Refusal) and "no kernel for d_v 7" in row.reason for row in rows)


def test_the_command_lists_cases_and_names_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel", "--list", "--shape", "qwen4b", "--rows", "256", "--tokens", "8"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"].split("-B")[0] for line in lines] == ["qwen4b-conventional", "qwen4b-update"]
    assert main(["bench", "kernel", "--list", "--shape", "qwen5b"]) == 1
    assert "nano4b" in capsys.readouterr().err
    assert main(["bench", "kernel", "--list", "--rows", "8", "--tokens", "6"]) == 1
    assert "at least one case" in capsys.readouterr().err


KERNELS = list({replace(case, rows=0, suite=""): case for case in kernel_cases()}.values())


@pytest.mark.gpu
@pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))
@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_every_built_kernel_of_the_list_passes_its_gate(case: KernelCase) -> None:
    try:
        found = gate.run_gate(case, _abi.Library(harness.LIBRARY))
    except UnsupportedError as error:
        pytest.skip(str(error).splitlines()[0])
    assert found.green, found


@pytest.mark.gpu
@pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))
@pytest.mark.parametrize(("accepted", "rows"), [(1, 5), (2, 5), (3, 5), (2, 1)])  # one has a kernel of its own
@pytest.mark.parametrize("scheme", list(Scheme), ids=lambda s: s.name.lower())
@pytest.mark.parametrize("shape_name", ["nano4b", "qwen4b"])
def test_every_recovery_scheme_verifies_and_recovers_like_the_recurrence(
    shape_name: str, scheme: Scheme, accepted: int, rows: int
) -> None:
    wanted = ("verify", shape_name, Operation.CONVENTIONAL, 4)
    (case,) = (c for c in kernel_cases() if (c.suite, c.shape_name, c.operation, c.tokens) == wanted)
    problem = SchemeProblem(replace(case, rows=rows), _abi.Library(harness.LIBRARY), scheme, accepted)
    assert scheme_gate(problem)
    problem.accepted = accepted + 1  # one record more than the device replays
    assert not scheme_gate(problem)
