"""What no tracked file may say, and what no library code may call.

The patterns are written in pieces so that this file does not match itself.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.contract.rooms import PACKAGE, ROOT, library_files, module_name, parse, room_of

WORDS = {
    "a path of the machine it was written on": re.compile(r"(?<![\w.-])/" r"work/|/root" r"/|\.libra" r"ry/"),
    "a neighbour of the checkout": re.compile(r"\.\./" r"shared"),
    "a package registry's host": re.compile(
        r"pypi" r"\.org|pythonhost" r"ed|npm" r"js\.|crates" r"\.io|proxy\.gol" r"ang"
    ),
    "a number in a tracker of ours": re.compile(r"\bissue" r" #?\d", re.IGNORECASE),
    "a page that is not here": re.compile(r"\bdata" r" sheet\b", re.IGNORECASE),
    "an unfinished part": re.compile(r"\bTO" r"DO\b|\bFIX" r"ME\b|\bX" r"XX\b"),
}
# file -> what it may say all the same, and why
ALLOWED = {
    "tests/paths.py": "a neighbour of the checkout",  # the one place that finds the optional original checkpoints
}
TEXT_SUFFIXES = {
    "", ".c", ".cfg", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".ini", ".jinja", ".json", ".md", ".py", ".sh",
    ".toml", ".txt", ".yaml", ".yml",
}  # fmt: skip
ENDS_PROCESS = {"exit", "quit", "sys.exit", "os._exit", "os.abort", "os.kill"}
OWN_ERRORS_ONLY = {
    "Exception", "BaseException", "AssertionError", "ValueError", "TypeError", "RuntimeError", "NotImplementedError",
    "OSError", "IOError", "MemoryError", "ArithmeticError", "LookupError", "IndexError", "SystemExit",
}  # fmt: skip


def tracked_files() -> list[Path]:
    """Text files under version control; every file of the tree where there is no git."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        paths = [ROOT / name for name in done.stdout.split("\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not any(part.startswith(".venv") for part in p.parts)]
    keep = [p for p in paths if p.is_file() and p.suffix in TEXT_SUFFIXES and not p.name.startswith("tokenizer")]
    return sorted(keep)


@pytest.mark.parametrize("path", tracked_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_tracked_file_speaks_of_the_product_alone(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for reason, pattern in WORDS.items():
            if pattern.search(line) and ALLOWED.get(name) != reason:
                found.append(f"{name}:{number}: {reason}: {line.strip()[:80]}")
    assert found == []


def called(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of every call of a plain or dotted name."""
    return [(node.lineno, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def offences(tree: ast.AST, *, is_cli: bool) -> list[str]:
    """Calls, raises and statements that library code must not contain."""
    found = [f"{line}: ends the process: {name}" for line, name in called(tree) if name in ENDS_PROCESS]
    if not is_cli:
        found += [f"{line}: prints" for line, name in called(tree) if name == "print"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{node.lineno}: global state: {', '.join(node.names)}")
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = ast.unparse(node.exc).partition("(")[0]
            if kind in OWN_ERRORS_ONLY:
                found.append(f"{node.lineno}: raises {kind} instead of a class of {PACKAGE}.errors")
    return found


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_library_code_neither_prints_nor_exits_nor_raises_foreign_errors(path: Path) -> None:
    if path.name == "__main__.py":
        pytest.skip("the process's entry ends the process")
    assert offences(parse(path), is_cli=room_of(module_name(path)) == "cli") == []


@pytest.mark.parametrize(
    "source",
    ["print(1)", "sys.exit(2)", "exit()", "def f():\n    global a", "raise ValueError('x')", "raise RuntimeError"],
)
def test_the_check_finds_an_offence(source: str) -> None:
    assert len(offences(ast.parse(source), is_cli=False)) == 1


@pytest.mark.parametrize(
    "line",
    ["see /" "work/main", "/" "root/x", "../" "shared/models", "pypi" ".org", "fixes Issue" " 12", "# TO" "DO: x"],
)
def test_the_check_finds_a_forbidden_word(line: str) -> None:
    assert sum(bool(pattern.search(line)) for pattern in WORDS.values()) == 1


@pytest.mark.parametrize("line", ["network/worker", "issue a step", "owner/repo/issues/12", "workloads/", "to do"])
def test_an_innocent_line_passes(line: str) -> None:
    assert not any(pattern.search(line) for pattern in WORDS.values())
