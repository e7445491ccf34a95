"""Every public module, class, function and method of the library says what it is for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract.rooms import PACKAGE, ROOT, library_files, module_name, parse

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Methods of the graph vocabulary are documented once, in the protocol; an interpreter need not repeat it.
VOCABULARY = frozenset(
    item.name
    for node in parse(ROOT / PACKAGE / "graph.py").body
    if isinstance(node, ast.ClassDef) and node.name == "Graph"
    for item in node.body
    if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
)
MIN_WORDS = 2


def undocumented(tree: ast.Module) -> list[str]:
    """Names of the public definitions of a module without a docstring of at least MIN_WORDS words."""
    found = [] if _documented(tree) else ["module"]
    todo: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while todo:
        prefix, parent = todo.pop()
        for node in parent.body:
            if not isinstance(node, Definition) or node.name.startswith("_"):
                continue
            inherited = isinstance(parent, ast.ClassDef) and node.name in VOCABULARY
            overload = any(ast.unparse(d).endswith(("overload", ".setter")) for d in node.decorator_list)
            if not (_documented(node) or inherited or overload):
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                todo.append((f"{prefix}{node.name}.", node))
    return found


def _documented(node: Definition | ast.Module) -> bool:
    return len((ast.get_docstring(node) or "").split()) >= MIN_WORDS


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_public_names_are_documented(path: Path) -> None:
    assert undocumented(parse(path)) == []


def test_the_check_finds_what_lacks_a_docstring() -> None:
    source = (
        "def f(): ...\nclass A:\n    def g(self): ...\n    def _h(self): ...\n    def linear(self): ...\n"
        "    def __eq__(self, o): ...\ndef k():\n    'One two.'\n    def inner(): ...\n"
    )
    assert sorted(undocumented(ast.parse(source))) == ["A", "A.g", "f", "module"]


def test_the_vocabulary_is_documented_in_the_protocol() -> None:
    assert {"linear", "mamba2", "gdn", "attention", "causal_conv1d", "moe"} <= VOCABULARY
