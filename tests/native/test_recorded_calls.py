"""Native calls are kept with their memory and come out the same again; with a driver and a library of the host."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.rooms import ROOT
from tests.native import host_stubs
from tests.native.calls import Pointer, load, places, pointers, ranges, save, view_bytes
from tests.native.recorded_calls import FOLDER, LEFT_OUT, MAX_BYTES
from tests.native.replayed_calls import unread
from trtllm_replayssm.ops import _abi

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

CALLER = """
import ctypes, os
import numpy as np
import pytest
from pathlib import Path
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.errors import ReplaySSMError

LIBRARY = _abi.Library(Path(os.environ["REPLAYSSM_NATIVE_LIBRARY"]))

def view(a, code=_abi.Dtype.FLOAT32):
    return _abi.tensor(a.ctypes.data, code, a.shape, [s // a.itemsize for s in a.strides])

def norm(x, out, eps=1.0, stream=0):
    weight = np.full(x.shape[1], 2, np.float32)
    LIBRARY.rms_norm(_abi.RmsNormArgs(eps=eps, x=view(x), weight=view(weight), out=view(out)), stream)

def test_norms():
    pool = np.arange(48, dtype=np.float32).reshape(4, 12)
    for _ in range(70):
        norm(pool[:, :4], pool[:, 6:10])  # rows of two views take turns
    assert pool[1, 6] == 24
    norm(pool[:3, :4], pool[:3, 6:10], stream=1)  # for a graph
    with pytest.raises(ReplaySSMError):
        norm(pool[:2, :4], pool[:2, 6:10], eps=-1)
    big = np.zeros((1, MAX // 4), np.float32)
    norm(big, big)

@pytest.mark.parametrize("bytes_", [0, 48])
def test_draw(bytes_):
    tokens, workspace = np.zeros((2, 1), np.int64), np.zeros(bytes_ + 1, np.uint8)
    args = _abi.DrawArgs(tokens=view(tokens, _abi.Dtype.INT64))
    LIBRARY.draw(args, workspace.ctypes.data if bytes_ else 0, bytes_, 0)
    assert tokens[1, 0] == int.from_bytes(bytes([bytes_]) * 8, "little")

def test_reads_what_it_writes():
    x, out = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    norm(x, out, eps=0.0)
    assert out[0, 0] == 3
""".replace("MAX", str(MAX_BYTES))


class Machine:
    """The stubs, tests that call the native library, and the calls of those tests."""

    def __init__(self, folder: Path) -> None:
        stubs = host_stubs.make(folder / "stubs", ROOT / "plugins" / "include")
        self.calls = folder / "calls"
        self.calls.mkdir()
        (folder / "test_calls.py").write_text(CALLER, encoding="utf-8")
        self.environment = {**os.environ, **stubs, "PYTHONPATH": str(ROOT), FOLDER: str(self.calls)}
        command = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.native.recorded_calls",
            "--rootdir",
            ".",
        ]
        done = self.python([*command, "test_calls.py"], folder)
        assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr

    def python(self, arguments: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, *arguments], self.environment
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    def replayed(self, folder: Path, tool: str, calls: Path | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
        claims, results = folder / "claims", folder / f"{tool}.jsonl"
        shutil.rmtree(claims, ignore_errors=True)
        claims.mkdir()
        done = self.python(["-m", "tests.native.replayed_calls", str(calls or self.calls), "--tool", tool,
                            "--claims", str(claims), "--results", str(results)])  # fmt: skip
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        assert done.stdout.count("CALL ") == len(rows), done.stdout + done.stderr
        return done.returncode, {row["call"]: row for row in rows}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


def test_what_is_kept(machine: Machine) -> None:
    calls = [load(path) for path in sorted(machine.calls.glob("*.npz"))]
    by_test = {name: [call for call in calls if call.test == f"test_calls.py::{name}"]
               for name in ("test_norms", "test_draw[0]", "test_draw[48]", "test_reads_what_it_writes")}  # fmt: skip
    assert {name: len(of) for name, of in by_test.items()} == {
        "test_norms": 8, "test_draw[0]": 1, "test_draw[48]": 1, "test_reads_what_it_writes": 1,
    }, "the first four of seventy and every sixteenth; none of a graph, of a failure, none so big"  # fmt: skip
    norm = by_test["test_norms"][0]
    where = {place.field: (place.buffer, place.offset) for place in norm.places}
    assert where["x"][0] == where["out"][0] != where["weight"][0] and where["out"][1] - where["x"][1] == 24
    assert len(norm.before[where["x"][0]]) == (3 * 12 + 10) * 4 and norm.after[where["weight"][0]] is None
    assert norm.after[where["x"][0]] is not None and norm.leads[where["x"][0]] % 4 == 0
    assert (by_test["test_draw[0]"][0].workspace_bytes, by_test["test_draw[48]"][0].workspace_bytes) == (0, 48)
    assert json.loads((machine.calls / LEFT_OUT).read_text())["name"] == "rssm_rms_norm"


def test_calls_come_out_the_same_again(machine: Machine, tmp_path: Path) -> None:
    status, rows = machine.replayed(tmp_path, "memcheck")
    assert status == 0 and len(rows) == 11 and {row["outcome"] for row in rows.values()} == {"equal"}


def test_a_byte_that_differs_is_found(machine: Machine, tmp_path: Path) -> None:
    calls = shutil.copytree(machine.calls, tmp_path / "calls")
    [path] = [path for path in calls.glob("*.npz") if load(path).test.endswith("test_reads_what_it_writes")]
    with np.load(path) as arrays:
        changed = dict(arrays)
    [after] = [name for name in changed if name.startswith("after")]
    changed[after] = changed[after] ^ np.uint8(1)
    np.savez(path, **changed)
    status, rows = machine.replayed(tmp_path, "memcheck", calls)
    assert status == 0 and rows[path.stem]["why"] == ["out: 24 of 24"]
    assert [row["outcome"] for row in rows.values()].count("equal") == 10


def test_initcheck_leaves_alone_what_must_not_be_read(machine: Machine, tmp_path: Path) -> None:
    status, rows = machine.replayed(tmp_path, "initcheck")
    assert status == 0 and {row["outcome"] for row in rows.values()} == {"equal"}
    calls = {call.test.partition("::")[2]: call for call in map(load, machine.calls.glob("*.npz"))}
    left = {
        name: {field for b in range(len(call.before)) if unread(call, b) for field in call.fields_of(b)}
        for name, call in calls.items()
    }
    assert left == {
        "test_norms": set(), "test_draw[0]": {"tokens"}, "test_draw[48]": {"tokens", "workspace"},
        "test_reads_what_it_writes": {"out"},
    }  # fmt: skip


def test_the_process_ends_at_a_failure(machine: Machine, tmp_path: Path) -> None:
    calls, at = tmp_path / "calls", _abi.RmsNormArgs.eps.offset
    calls.mkdir()
    for path in machine.calls.glob("*.npz"):
        call = load(path)
        if call.name == "rssm_rms_norm":
            struct = call.struct[:at] + np.float32(-1).tobytes() + call.struct[at + 4 :]
            save(replace(call, struct=struct), calls / path.name)
    status, rows = machine.replayed(tmp_path, "memcheck", calls)
    [row] = rows.values()
    assert status == 3 and row["outcome"] == "failed" and "eps" in row["why"][0]


def test_extents_of_views() -> None:
    def of(code: _abi.Dtype, shape: list[int], stride: list[int]) -> int:
        return view_bytes(_abi.tensor(4096, code, shape, stride))

    assert of(_abi.Dtype.FLOAT4_E2M1, [2, 3], [16, 1]) == 10 and of(_abi.Dtype.INT64, [], []) == 8
    assert of(_abi.Dtype.BFLOAT16, [3, 2], [0, 5]) == 12 and of(_abi.Dtype.FLOAT32, [4, 0], [1, 1]) == 0


def test_pointers_of_nested_structs_and_of_inboxes() -> None:
    x = _abi.tensor(4096, _abi.Dtype.BFLOAT16, [2, 8], [8, 1])
    packed = _abi.PackedLinearArgs(weight=_abi.PackedWeights(data=x), out=x)
    assert [(p.field, p.at) for p in pointers(packed)] == [
        ("weight.data", _abi.PackedLinearArgs.weight.offset + _abi.PackedWeights.data.offset),
        ("out", _abi.PackedLinearArgs.out.offset),
    ]
    ranks = _abi.SumRanksArgs(ranks=2, capacity=3, x=x, inbox=(ctypes.c_void_p * 8)(8192, 16384), gave_up=64)
    found = {(p.field, p.address): (p.size, p.host) for p in pointers(ranks)}
    assert found["inbox", 16384] == (2 * 2 * 3 * 8 * 2, False) and found["gave_up", 64] == (4, True)


def test_overlapping_views_share_a_range_and_neighbours_do_not() -> None:
    found = [Pointer("a", 0, 100, 20), Pointer("b", 8, 110, 30), Pointer("c", 16, 140, 4), Pointer("d", 24, 140, 0)]
    where = ranges(found)
    assert where == [(100, 140, False), (140, 140, False), (140, 144, False)]
    assert [(p.buffer, p.offset) for p in places(found, where)] == [(0, 0), (0, 10), (2, 0), (2, 0)]
