"""How heads are dealt out to persistent workers (replay_update/deal.h): every head once, no run across groups."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.host_program import built

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include "kernels/replay_update/deal.h"
int main(int argc, char** argv) {
  replayssm::UpdateParams p{};
  p.rows = std::atoi(argv[1]);
  p.heads = std::atoi(argv[2]);
  p.groups = std::atoi(argv[3]);
  p.headsPerGroup = p.heads / p.groups;
  replayssm::LaunchWish wish{};
  if (argc > 6) {
    wish.runHeads = std::atoi(argv[6]);
    wish.pieceHeads = std::atoi(argv[7]);
    wish.drawnRounds = std::atoi(argv[8]);
  }
  const int workers = std::atoi(argv[4]);
  const int run = argc > 9 ? std::atoi(argv[9]) : 0, manyPiece = argc > 10 ? std::atoi(argv[10]) : 0;
  const int fewRun = argc > 11 ? std::atoi(argv[11]) : 0;
  const replayssm::WorkDeal d = replayssm::dealWork(p, workers, std::atoi(argv[5]), wish, run, manyPiece, fewRun);
  std::printf("%d %d %d %d %d %d %d\n", d.rounds, d.roundHeads, d.pieceHeads, d.base, d.large, d.pieces,
              replayssm::dealable(p, workers, d, wish));
}
"""
SHAPES = [(96, 8, 264, 2), (128, 8, 264, 2), (32, 16, 132, 2), (64, 16, 132, 2), (15, 5, 40, 1), (7, 1, 132, 1)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("deal"), PROGRAM)


def dealt_once(numbers: list[int], rows: int, heads: int, groups: int, workers: int) -> bool:
    """Whether a deal covers every head exactly once, in order, and no run lies in two groups."""
    rounds, round_heads, piece_heads, base, large, pieces, _ = numbers
    runs = [(index * round_heads, round_heads) for index in range(rounds * workers)]
    runs += [(base + n * piece_heads, piece_heads) for n in range(large)]
    runs += [(base + large * piece_heads + n, 1) for n in range(pieces - large)]
    dealt = [head for first, count in runs for head in range(first, first + count)]
    per_group = heads // groups
    whole = all(first // per_group == (first + count - 1) // per_group for first, count in runs)
    return whole and dealt == list(range(rows * heads))


def deal(program: Path, *numbers: int) -> list[int]:
    printed = subprocess.run([str(program), *map(str, numbers)], check=True, capture_output=True, text=True).stdout
    return [int(number) for number in printed.split()]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 31, 32, 128, 256])
@pytest.mark.parametrize(("heads", "groups", "teams", "piece"), SHAPES)
def test_every_head_is_dealt_once(program: Path, rows: int, heads: int, groups: int, teams: int, piece: int) -> None:
    workers = min(teams, rows * heads)
    numbers = deal(program, rows, heads, groups, workers, piece)
    assert dealt_once(numbers, rows, heads, groups, workers) and numbers[-1] == 1, "its own choice can be dealt"


@pytest.mark.parametrize("rows", [1, 3, 31, 256])
@pytest.mark.parametrize(("heads", "groups", "teams", "piece"), [SHAPES[0], SHAPES[1], SHAPES[3], (60, 5, 40, 2)])
def test_every_head_is_dealt_once_as_asked_where_that_can_be_dealt(
    program: Path, rows: int, heads: int, groups: int, teams: int, piece: int
) -> None:
    """Sizes of runs and pieces and rounds to draw, impossible ones too: what is let through is a whole deal."""
    workers, through = min(teams, rows * heads), 0
    for run in (0, 1, 2, 3, 4, 8, heads // groups):
        for asked in (0, 1, 2, 3, 4, 8):
            for drawn in (0, 1, 2, 5):
                numbers = deal(program, rows, heads, groups, workers, piece, run, asked, drawn)
                if numbers[-1]:
                    through += 1
                    assert dealt_once(numbers, rows, heads, groups, workers), (run, asked, drawn)
    assert through >= 7


@pytest.mark.parametrize(("rows", "pieces"), [(256, 4), (32, 2), (8, 4)])
def test_larger_pieces_where_there_are_many_rounds(program: Path, rows: int, pieces: int) -> None:
    """Of 128 heads in groups of 16 on 264 workers: 31 rounds of four heads, 3, none (each worker has one run)."""
    numbers = deal(program, rows, 128, 8, 264, 2, 0, 0, 0, 4, 4)
    assert dealt_once(numbers, rows, 128, 8, 264) and numbers[1:3] == [4, pieces] and numbers[-1] == 1


def test_a_piece_that_is_no_part_of_the_usual_run_makes_runs_of_whole_groups(program: Path) -> None:
    numbers = deal(program, 256, 128, 8, 264, 2, 0, 8, 0, 4, 4)
    assert dealt_once(numbers, 256, 128, 8, 264) and numbers[1:3] == [16, 8] and numbers[-1] == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 11, 16, 31, 32, 64, 65, 256])
@pytest.mark.parametrize(("heads", "groups", "workers"), [(96, 8, 264), (128, 8, 264), (96, 8, 30)])
def test_few_groups_are_dealt_in_runs_of_two_and_drawn_head_by_head(
    program: Path, rows: int, heads: int, groups: int, workers: int
) -> None:
    """Where each worker has less than two groups and more than one run; what is asked goes before, many are as ever."""
    workers = min(workers, rows * heads)
    numbers = deal(program, rows, heads, groups, workers, 2, 0, 0, 0, 4, 0, 2)
    assert dealt_once(numbers, rows, heads, groups, workers) and numbers[-1] == 1
    usual = deal(program, rows, heads, groups, workers, 2, 0, 0, 0, 4, 0)
    whole = workers < rows * heads <= usual[2] * workers  # a run each
    if rows * groups < 2 * workers and heads // groups % 2 == 0 and not whole:
        assert numbers[1:3] == [2, 1]
    else:
        assert numbers == usual
    asked = (program, rows, heads, groups, workers, 2, 0, 2, 0, 4, 0)
    assert deal(*asked, 2) == deal(*asked)


def test_few_groups_with_many_rounds_keep_pieces_that_divide_their_runs(program: Path) -> None:
    numbers = deal(program, 27, 320, 10, 191, 2, 0, 0, 0, 4, 4, 2)
    assert dealt_once(numbers, 27, 320, 10, 191) and numbers[1:3] == [2, 1] and numbers[-1] == 1


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "workers", "run", "drawn"),
    [
        (128, 32, 16, 132, 0, 5), (256, 32, 16, 132, 0, 8), (512, 32, 16, 132, 0, 10),  # runs of two heads
        (64, 64, 16, 132, 0, 2), (128, 64, 16, 132, 0, 4), (256, 64, 16, 132, 0, 5),  # of four
        (128, 96, 8, 264, 4, 3), (256, 96, 8, 264, 0, 2), (64, 128, 8, 264, 4, 1),  # the last one: few groups
    ],
)  # fmt: skip
def test_rounds_that_are_drawn(
    program: Path, rows: int, heads: int, groups: int, workers: int, run: int, drawn: int
) -> None:
    """A sixth, or sixteen heads where that is more, of which no more than a third."""
    rounds, run_heads, *_ = deal(program, rows, heads, groups, workers, 2, 0, 0, 0, run)
    assert rows * heads // run_heads // workers - rounds == drawn


def test_few_heads_are_one_run_each(program: Path) -> None:
    """Eight rows of 128 heads in groups of 16 on 264 workers: four heads each, nothing to draw."""
    assert deal(program, 8, 128, 8, 264, 2) == [0, 4, 4, 0, 256, 256, 1]
