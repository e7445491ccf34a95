"""How rows that flush are cut into parts (narrow_update/flush_cut.h): every head once, smaller parts for few rows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.host_program import built

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include "kernels/narrow_update/flush_cut.h"
int main(int, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  const auto cut = replayssm::cutFlushes(number(1), number(2), number(3), {number(4), number(5)}, number(6));
  std::printf("%d %d %d\n", cut.groups, cut.heads, cut.partsOfRow(number(2), number(3)));
}
"""
# groups of a row, heads of a group, groups and heads of the largest part, CTAs
QWEN_4B, QWEN_122B = (16, 2, 4, 8, 264), (16, 4, 2, 8, 264)
NANO_4B, SUPER_120B = (8, 12, 1, 12, 264), (8, 16, 1, 16, 396)
UNEVEN = (5, 7, 1, 5, 40)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("flush_cut"), PROGRAM)


def cut(program: Path, rows: int, shape: tuple[int, ...]) -> list[int]:
    command = [str(program), *map(str, (rows, *shape))]
    return [int(n) for n in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33, 64, 256, 1000])
@pytest.mark.parametrize("shape", [QWEN_4B, QWEN_122B, NANO_4B, SUPER_120B, UNEVEN])
def test_every_head_of_a_row_is_in_one_part(program: Path, rows: int, shape: tuple[int, ...]) -> None:
    """As kernels count: a part's heads are of as many whole groups, or a run of one group's."""
    groups, heads_per_group, most_groups, most_heads, _ = shape
    part_groups, part_heads, parts = cut(program, rows, shape)
    assert part_groups <= most_groups and part_heads <= most_heads
    runs = parts * part_groups // groups  # of a set of part_groups groups
    heads: list[int] = []
    for place in range(parts):
        part_set, run = place // runs, place % runs * part_heads
        first = part_set * part_groups * heads_per_group + run
        heads += range(first, first + min(part_heads, part_groups * heads_per_group - run))
    assert heads == list(range(groups * heads_per_group))
    assert part_groups == 1 or part_heads == part_groups * heads_per_group


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        (QWEN_4B, 256, (4, 8)), (QWEN_4B, 16, (1, 2)), (QWEN_4B, 32, (2, 4)), (QWEN_4B, 1, (1, 1)),
        (QWEN_122B, 256, (2, 8)), (QWEN_122B, 16, (1, 4)), (NANO_4B, 256, (1, 12)), (NANO_4B, 16, (1, 6)),
        (NANO_4B, 32, (1, 12)), (SUPER_120B, 256, (1, 16)), (SUPER_120B, 16, (1, 8)),
    ],
)  # fmt: skip
def test_parts_are_as_small_as_makes_the_ctas_ready_soonest(
    program: Path, shape: tuple[int, ...], rows: int, expected: tuple[int, int]
) -> None:
    assert tuple(cut(program, rows, shape)[:2]) == expected
