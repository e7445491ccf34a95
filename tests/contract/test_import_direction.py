"""Who may import whom: the table of rooms.py against every file, and rooms without torch by importing them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_replayssm
from tests.contract.rooms import (
    BY_NAME,
    FOLDERS,
    MAY_IMPORT,
    MAY_USE,
    NO_TORCH,
    PACKAGE,
    ROOMS,
    ROOT,
    imports_of,
    library_files,
    module_name,
    parse,
    room_of,
)

KNOWN = frozenset(module_name(path) for path in library_files())
OTHER_FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), ROOT / "setup.py"])


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What `source`, as library module `module`, imports against the table."""
    room = room_of(module)
    if room is None:
        return [f"{module}: no room: add its folder to tests/contract/rooms.py"]
    found = []
    for item in imports_of(ast.parse(source), module, is_package=is_package, known=KNOWN):
        top = item.module.partition(".")[0]
        if top == PACKAGE:
            target = room_of(item.module)
            if target != room and target not in MAY_IMPORT[room]:
                found.append(f"{module}:{item.line}: room {room} must not import {item.module} (room {target})")
        elif top not in sys.stdlib_module_names and top not in MAY_USE[room]:
            found.append(f"{module}:{item.line}: room {room} must not use {item.module}")
    return found


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert violations(source, module_name(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec.ssm", "import torch"),
        ("runtime.scheduler.batch", "def f():\n    from torch import nn"),
        ("runtime.scheduler.batch", "from trtllm_replayssm.runtime.session import torch_session"),
        ("runtime.scheduler.batch", "if TYPE_CHECKING:\n    from ..session import torch_session"),
        ("builders.build", "from ..runtime import engine"),
        ("ops.reference.gdn", "from trtllm_replayssm.spec import ssm"),
        ("ops.ssm", "import trtllm_replayssm.builders"),
        ("models.qwen3_5", "import numpy"),
        ("weights.names", "import tests.paths"),
        ("runtime.unheard_of.thing", "import runtime.pools"),
        ("unheard_of", ""),
    ],
)
def test_the_check_finds_a_forbidden_import(module: str, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}")) == 1


def test_every_room_has_its_rows_and_only_known_rooms_are_named() -> None:
    rooms = set(ROOMS.values())
    assert rooms == set(MAY_IMPORT) == set(MAY_USE)
    assert set().union(*MAY_IMPORT.values()) <= rooms


def test_no_room_has_a_permission_that_it_does_not_use() -> None:
    """The table says what is, so that a new dependency of a room is a line of it that somebody wrote."""
    rooms, packages = ({room: set[str]() for room in MAY_IMPORT} for _ in range(2))
    for path in library_files():
        module = module_name(path)
        room = room_of(module)
        assert room is not None
        for item in imports_of(parse(path), module, is_package=path.name == "__init__.py", known=KNOWN):
            target = room_of(item.module)
            (rooms if target else packages)[room].add(target or item.module.partition(".")[0])
    rooms["package"] |= {str(room_of(module)) for module in trtllm_replayssm._LAZY.values()}
    assert {room: names - rooms[room] for room, names in MAY_IMPORT.items() if names - rooms[room]} == {}
    unused = {room: names - packages[room] - BY_NAME for room, names in MAY_USE.items()}
    assert {room: names for room, names in unused.items() if names} == {}


def test_no_two_rooms_may_import_each_other() -> None:
    reach = {room: set(targets) for room, targets in MAY_IMPORT.items()}
    for _ in reach:
        for targets in reach.values():
            targets |= set().union(*(reach[t] for t in targets))
    assert [room for room, targets in reach.items() if room in targets] == []


@pytest.mark.parametrize("path", [*library_files(), *OTHER_FILES], ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_are_imported_by_their_long_names_only(path: Path) -> None:
    """From the root, `runtime` and `builders` would resolve a second time, as other modules with other classes."""
    short = set(FOLDERS) - {PACKAGE}
    imports = imports_of(parse(path), "x.y", is_package=False, known=frozenset())
    assert [i for i in imports if i.module.partition(".")[0] in short] == []


def test_every_folder_of_the_library_is_a_package() -> None:
    """setup.py packages only folders with an __init__.py: a wheel would lack the others."""
    assert [p.parent for p in library_files() if not (p.parent / "__init__.py").exists()] == []


def test_rooms_without_torch_import_where_torch_is_missing() -> None:
    modules = sorted(m for m in KNOWN if room_of(m) in NO_TORCH - {"builders"})
    code = "import importlib, sys\nsys.modules['torch'] = None\nfor m in sys.argv[1:]: importlib.import_module(m)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
