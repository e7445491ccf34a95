"""How heads are dealt out to persistent workers (replay_update/deal.h): every head once, no run across groups."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.contract.rooms import ROOT

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include "kernels/replay_update/deal.h"
int main(int, char** argv) {
  replayssm::UpdateParams p{};
  p.rows = std::atoi(argv[1]);
  p.heads = std::atoi(argv[2]);
  p.groups = std::atoi(argv[3]);
  p.headsPerGroup = p.heads / p.groups;
  const replayssm::WorkDeal d = replayssm::dealWork(p, std::atoi(argv[4]), std::atoi(argv[5]));
  std::printf("%d %d %d %d %d %d\n", d.rounds, d.roundHeads, d.pieceHeads, d.base, d.large, d.pieces);
}
"""
SHAPES = [(96, 8, 264, 2), (128, 8, 264, 2), (32, 16, 132, 2), (64, 16, 132, 2), (15, 5, 40, 1), (7, 1, 132, 1)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("deal")
    source, binary = folder / "deal.cpp", folder / "deal"
    source.write_text(PROGRAM)
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'plugins'}", str(source), "-o", str(binary)], check=True
    )
    return binary


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 31, 32, 128, 256])
@pytest.mark.parametrize(("heads", "groups", "teams", "piece"), SHAPES)
def test_every_head_is_dealt_once(program: Path, rows: int, heads: int, groups: int, teams: int, piece: int) -> None:
    workers = min(teams, rows * heads)
    arguments = [str(n) for n in (rows, heads, groups, workers, piece)]
    printed = subprocess.run([str(program), *arguments], check=True, capture_output=True, text=True).stdout
    rounds, round_heads, piece_heads, base, large, pieces = (int(n) for n in printed.split())
    runs = [(index * round_heads, round_heads) for index in range(rounds * workers)]
    runs += [(base + n * piece_heads, piece_heads) for n in range(large)]
    runs += [(base + large * piece_heads + n, 1) for n in range(pieces - large)]
    dealt = [head for first, count in runs for head in range(first, first + count)]
    assert dealt == list(range(rows * heads))
    per_group = heads // groups
    assert all(first // per_group == (first + count - 1) // per_group for first, count in runs)


def test_few_heads_are_one_run_each(program: Path) -> None:
    """Eight rows of 128 heads in groups of 16 on 264 workers: four heads each, nothing to draw."""
    printed = subprocess.run([str(program), "8", "128", "8", "264", "2"], check=True, capture_output=True, text=True)
    assert printed.stdout.split() == ["0", "4", "4", "0", "256", "256"]
