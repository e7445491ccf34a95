"""Files, functions and argument lists stay small enough to be read at once; exceptions are listed with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.rooms import ROOT, library_files, parse

MODULE_LINES = 300
TEST_LINES = 400
FUNCTION_LINES = 60
POSITIONAL_ARGS = 8

# file (or file::function) -> why it may be larger
EXCEPTIONS: dict[str, str] = {}

TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
PRODUCT_FILES = [*library_files(), ROOT / "setup.py", *sorted((ROOT / "examples").rglob("*.py"))]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """Every function and method of a file with its key in EXCEPTIONS."""
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            yield f"{path.relative_to(ROOT)}::{node.name}", node


def lines_of(node: Function) -> int:
    """Physical lines from `def` to the last, decorators not counted."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def positional(node: Function) -> int:
    """Arguments that a caller may pass by position; `self` and `cls` not counted."""
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("path", [*PRODUCT_FILES, *TEST_FILES], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_and_its_functions_fit_the_budget(path: Path) -> None:
    limit = TEST_LINES if path in TEST_FILES else MODULE_LINES
    lines = len(path.read_text(encoding="utf-8").splitlines())
    over = [f"{path.relative_to(ROOT)}: {lines} lines, limit {limit}"] if lines > limit else []
    for key, node in functions(path):
        if lines_of(node) > FUNCTION_LINES:
            over.append(f"{key}: {lines_of(node)} lines, limit {FUNCTION_LINES}")
        if positional(node) > POSITIONAL_ARGS:
            over.append(f"{key}: {positional(node)} positional arguments, limit {POSITIONAL_ARGS}")
    assert [message for message in over if message.partition(": ")[0] not in EXCEPTIONS] == []


def test_every_exception_is_still_needed() -> None:
    keys = {str(p.relative_to(ROOT)) for p in (*PRODUCT_FILES, *TEST_FILES)}
    keys |= {key for path in (*PRODUCT_FILES, *TEST_FILES) for key, _ in functions(path)}
    assert set(EXCEPTIONS) <= keys
    assert all(EXCEPTIONS.values())


def test_the_counts_are_right() -> None:
    source = "class A:\n    @property\n    def f(self, a, /, b, *, c):\n        return (a,\n                b)\n"
    node = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, Function))
    assert (lines_of(node), positional(node)) == (3, 2)
