"""The rooms of the library, which room may import which, and how files and imports are found. No test here.

The table is the contract; CONTRIBUTING.md says why. A new file in a known folder belongs to that folder's room; a
new folder needs a row in ROOMS, MAY_IMPORT and MAY_USE.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "trtllm_replayssm"
FOLDERS = {PACKAGE: PACKAGE, "builders": f"{PACKAGE}.builders", "runtime": f"{PACKAGE}.runtime"}

# Longest prefix of a module's name without "trtllm_replayssm." -> its room. "rules" are the parts of the specification
# that the product shares with it (random words, storage formats, acceptance, cursors); the rest of the specification
# judges the operations, so they must not be built from it. Files directly in runtime/ that are not named here are parts
# of the engine.
ROOMS = {
    "": "package",
    "_version": "contract", "errors": "contract", "dtypes": "contract", "shapes": "contract", "params": "contract",
    "checks": "contract", "config": "contract", "graph": "contract", "bindings": "contract", "manifest": "contract",
    "launches": "contract", "bundle_parts": "contract", "collection": "contract", "whole_file": "contract",
    "spec": "spec", "spec.philox": "rules", "spec.formats": "rules", "spec.accept": "rules",
    "spec.cursors": "rules", "spec.traffic": "rules", "spec.decay_skip": "rules", "spec.adaptive_window": "rules",
    "spec.tuning": "rules",
    "models": "models", "weights": "weights", "ops": "ops", "cli": "cli",
    "bench": "bench", "bench.cases": "bench cases", "bench.bounds": "bench cases", "bench.step": "step bench",
    "bench.throughput": "throughput bench",
    "bench.layers": "layer bench",
    "builders": "builders", "__main__": "cli",
    "runtime": "runtime",
    "runtime.pools": "pools",
    "runtime.pools.slots": "slots",
    "runtime.sampling": "sampling",
    "runtime.text": "text",
    "runtime.speculative": "speculative",
    "runtime.device": "device", "runtime.device.entry": "device entry",
    "runtime.scheduler": "scheduler",
    "runtime.prefix": "prefix", "runtime.transfer": "transfer",
    "runtime.session": "session", "runtime.evaluation": "evaluation",
    "runtime.session.base": "session interface",
    "runtime.<file>": "engine parts",
    "runtime.engine": "engine", "runtime.replica": "replica", "runtime.bundle": "replica",
    "runtime.device_memory": "replica", "runtime.ahead": "replica", "runtime.checkpoint_session": "replica",
    "runtime.llm": "llm", "runtime.loop": "llm", "runtime.handle": "llm", "runtime.progress": "llm",
    "runtime.server": "server",
}  # fmt: skip

# Room -> rooms it imports besides itself, and no others; imports under TYPE_CHECKING and inside functions count
MAY_IMPORT = {
    "contract": set(),
    "package": {"contract", "sampling", "llm"},
    "rules": {"contract"},
    "spec": {"contract", "rules"},
    "models": {"contract"},
    "weights": {"contract", "models"},
    "ops": {"contract", "rules"},
    "bench cases": {"contract", "rules"},
    "bench": {"contract", "ops", "bench cases"},
    "layer bench": {"contract", "models", "weights", "ops", "pools", "session", "bench"},
    "step bench": {"contract", "rules", "weights", "ops", "pools", "session", "engine parts"},
    "throughput bench": {"contract", "sampling", "engine parts", "llm"},
    "builders": {"contract", "models", "weights"},
    "runtime": set(),
    "slots": {"contract"},
    "pools": {"contract", "slots", "ops"},
    "sampling": {"contract"},
    "text": {"contract"},
    "speculative": {"contract", "rules", "sampling"},
    "scheduler": {"contract", "rules", "sampling", "speculative", "text"},
    "session interface": {"contract"},
    "device entry": {"sampling"},
    "device": {"contract", "rules", "ops", "device entry"},
    "session": {"contract", "models", "weights", "ops", "pools", "session interface"},
    "evaluation": {"contract", "rules", "weights", "ops", "pools", "session interface", "session", "text"},
    "prefix": {"contract", "rules", "scheduler", "session interface"},
    "transfer": {"contract", "sampling", "text", "speculative", "scheduler", "session interface"},
    "engine parts": {"contract", "rules", "sampling", "text", "speculative", "scheduler"}
    | {"session interface", "prefix", "device entry"},
    "engine": {"contract", "sampling", "text", "speculative", "scheduler"}
    | {"engine parts", "session interface", "prefix", "transfer"},
    "replica": {"contract", "weights", "sampling", "text", "speculative", "session interface", "session"}
    | {"device", "prefix", "engine parts", "engine"},
    "llm": {"contract", "sampling", "text", "scheduler", "engine parts", "engine", "replica"},
    "server": {"contract", "package", "sampling", "text", "engine parts", "llm"},
    "cli": {"contract", "package", "weights", "builders", "sampling", "text", "rules"}
    | {"ops", "bench", "bench cases", "step bench", "throughput bench", "evaluation", "session"}
    | {"engine parts", "replica", "llm", "server"},
}

# Imported by the name that a bundle or an option gives, which no parser sees
BY_NAME = frozenset({"tensorrt", "tensorrt_rtx"})
# Room -> packages of others it imports, and no others; the standard library is free
MAY_USE = {
    "contract": set(),
    "package": set(),
    "rules": {"numpy"},
    "spec": {"numpy"},
    "models": set(),
    "weights": {"numpy", "ml_dtypes", "safetensors"},
    "ops": {"torch", "numpy"},
    "bench cases": set(),
    "bench": {"torch", "vllm", "flashinfer"},  # the peers only where they are installed
    "layer bench": {"torch"},
    "step bench": {"torch", "matplotlib"},  # matplotlib for figures only, an extra
    "throughput bench": set(),
    "builders": {"numpy", "ml_dtypes", *BY_NAME},
    "runtime": set(),
    "slots": set(),
    "pools": {"torch"},
    "sampling": {"numpy"},
    "text": {"tokenizers", "jinja2"},
    "speculative": {"numpy"},
    "scheduler": set(),
    "session interface": {"numpy"},
    "device entry": {"numpy"},
    "device": {"torch", "numpy"},
    "evaluation": {"torch", "numpy", "matplotlib"},  # matplotlib for figures only, an extra
    "prefix": set(),
    "transfer": {"numpy", "safetensors"},
    "session": {"torch", "numpy", *BY_NAME},
    "engine parts": {"numpy"},
    "engine": set(),
    "replica": {"torch"},  # for the free memory of a device; the session it makes brings torch anyway
    "llm": {"rich"},
    "server": {"fastapi", "uvicorn", "h11", "starlette", "pydantic", "prometheus_client", "xgrammar", "yaml", "numpy"},
    "cli": {"rich"},
}
NO_TORCH = frozenset(room for room, used in MAY_USE.items() if "torch" not in used) - {"server", "cli"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module by absolute name, and the line that imports it."""

    module: str
    line: int


def library_files() -> list[Path]:
    """Every Python file of the library that exists."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Import name of a library file: runtime/pools/slots.py -> trtllm_replayssm.runtime.pools.slots."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    if rest[-1] == "__init__":
        rest.pop()
    return ".".join([FOLDERS[folder], *rest])


def room_of(module: str) -> str | None:
    """The room of an import name of the library; None when no row of ROOMS covers it."""
    rest = module.removeprefix(PACKAGE).removeprefix(".")
    if rest.startswith("runtime.") and rest.count(".") == 1 and rest not in ROOMS:
        rest = "runtime.<file>"
    while rest not in ROOMS and "." in rest:
        rest = rest.rpartition(".")[0]
    return ROOMS.get(rest) if rest != "runtime" or module == f"{PACKAGE}.runtime" else None


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(tree: ast.AST, module: str, *, is_package: bool, known: frozenset[str]) -> Iterator[Import]:
    """Every import of a file, also under TYPE_CHECKING and inside functions; `known` are the library's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in known else base, node.lineno)
