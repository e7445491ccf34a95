"""Which test holds which known fault of this method: a row of the table of reported faults, and the file that tries it.

| rows | file | what |
|---|---|---|
| A02 A04 C04 C05 | cases/test_poison_rules.py | what nobody may read; padding rows |
| A05 A07 A09 A12 A16 A23 A24 D02 D07 D08 D11 | cases/test_replay_cases.py | drift, flushed checkpoints, boundaries |
| A01 B01 B08 B12 B14 B16 B17 | cases/test_slot_cases.py | reuse, preemption, short suffixes |
| D01 D12 F12 F15 | cases/test_model_cases.py | state type, norm groups, routing, padded rows |
| A06 | session/test_specification.py | rounding points and draws of whole models |
| A20 C01 C02 D14 | session/test_mixed_rows.py | mixed and padded batches |
| B17 | session/test_errors.py | preemption in the middle of a verify step is refused |
| B19 I10 | session/test_prefill.py | chunks of whole models |
| A13 A15 A22 D15 | ops/test_conv1d.py | the convolution window |
| B09 B11 B19 D08 I10 | ops/test_prefill.py | prompt scans |
| A16 A21 A23 A27 | ops/test_rows_and_commit.py | row checks, clamps |
| C15 | ops/test_stochastic_rounding.py | random words |
| D05 | ops/test_state_store.py | scales of awkward blocks |
| D10 | ops/test_update.py | head sizes and odd head counts |
| B04 | pools/test_slots.py | slot ids |
| I01 I03 I04 I06 I07 I13 I16 | runtime/test_stops.py | ends, stop strings, counts of tokens |
| I07 I10 I11 I13 I16 I18 I19 I21 | server/test_cases.py | the same and more over HTTP, streamed or not |
| I09 I10 I21 | runtime/test_speculation.py | probabilities and text with drafts |
| I11 | runtime/test_sampling.py | scores without alternatives |
| I14 | server/test_disconnect.py | clients that leave |
| I16 | runtime/test_text.py | characters cut into tokens |
| I18 | runtime/test_choices.py | several choices with one seed |
| I22 | server/test_guided.py | JSON with drafts |
| A01 B02 | pools/test_state_pools.py | registers, snapshots that do not fit |
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = (
    "A01 A02 A04 A05 A06 A07 A09 A12 A13 A15 A16 A20 A21 A22 A23 A24 A27 B01 B02 B04 B08 B09 B11 B12 B14 B16 B17 B19 "
    "C01 C02 C04 C05 C15 D01 D02 D05 D07 D08 D10 D11 D12 D14 D15 F12 F15 "
    "I01 I03 I04 I06 I07 I09 I10 I11 I13 I14 I16 I18 I19 I21 I22"
)


def table() -> list[tuple[str, str]]:
    """(row, file) pairs of the module's docstring."""
    lines = re.findall(r"^\| ([A-Z0-9 ]+) \| (\S+\.py) \|", __doc__ or "", re.MULTILINE)
    return [(row, file) for rows, file in lines for row in rows.split()]


@pytest.mark.parametrize("row,file", table())
def test_the_file_of_a_row_has_a_test_named_after_it(row: str, file: str) -> None:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith("test_") and row.lower() in name.split("_") for name in names)


def test_every_row_is_in_the_table() -> None:
    assert sorted({row for row, _ in table()}) == sorted(ROWS.split())
