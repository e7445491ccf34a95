"""What an engine bundle promises, and the strict JSON form of frozen dataclasses in which it is stored.

A bundle is a directory: `config.json` (for people and tools; keys modelled on TensorRT-LLM's), `manifest.json` (this
file), `engines/`, `weights/`, `build_log/`, tokenizer files. The manifest names every file with its hash; a session
loads nothing before `check_files` and `require_same` have passed.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from trtllm_replayssm.bindings import Program
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.shapes import ModelGeometry

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
MAIN, MTP, COMMIT_PROGRAM = "main", "mtp", "commit"
"""Programs: the model, its drafting head, what moves the cursors after a step of engines with plugins."""
CONTEXT, GENERATION, VERIFY = "context", "generation", "verify"
"""Profiles: prompt chunks, steps of one token a row, steps with drafts."""
_HINT = "Build the bundle again"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Inclusive ranges (smallest, typical, largest) of rows, tokens of a row and selected tokens."""

    rows: tuple[int, int, int]
    tokens: tuple[int, int, int]
    selected: tuple[int, int, int]
    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """What the engines were built with and for.

    target: compute capability ("12.0"), or "current". activation: element type of activations and caches.
    weights: "checkpoint" (as stored) or "bf16"; checkpoint: which one, see `weights.identity`, or which random weights.
    max_seq_len: positions of a cache row; context_tokens: largest chunk. tp_size: GPUs that share the model; tp_rank:
    the one that these engines are for.
    """

    flavour: str
    tensorrt_version: str
    product_version: str
    target: str
    activation: str
    weights: str
    checkpoint: str
    max_batch: int
    max_seq_len: int
    context_rows: int
    context_tokens: int
    tp_size: int
    tp_rank: int
    peak_rss_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Device bytes of one execution context by profile number, as the builder reports them.

    shared: scratch, of which the contexts of a session need one piece as large as the largest; own: what each keeps.
    Both are empty where the builder reported nothing.
    """

    shared: tuple[int, ...]
    own: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """geometry, replay: what was built, the whole model's also for one of several ranks; profiles: by name in the order
    of the engines' profile numbers; programs: main and, where the model has the head, mtp; memory: by engine; files:
    path in the bundle -> SHA-256.
    """

    format_version: int
    build: BuildInfo
    geometry: ModelGeometry
    replay: ReplayConfig
    profiles: dict[str, Profile]
    programs: dict[str, Program]
    memory: dict[str, EngineMemory]
    files: dict[str, str]

    def pool(self, slots: int) -> PoolConfig:
        """Capacity of a session over the bundle."""
        return PoolConfig(
            slots=slots, max_seq_len=self.build.max_seq_len, activation=ActivationDtype(self.build.activation)
        )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`."""
    text = json.dumps(to_json(manifest), indent=1, sort_keys=True)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read it. Raises EngineMismatchError naming the first key that does not fit."""
    try:
        value = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _mismatch(str(directory / MANIFEST), "a readable manifest", str(error)[:200]) from None
    found = value.get("format_version") if isinstance(value, dict) else None
    if found != FORMAT_VERSION:
        raise _mismatch("format_version", FORMAT_VERSION, found)
    manifest: Manifest = from_json(Manifest, value, "manifest")
    activations = [activation.value for activation in ActivationDtype]
    if manifest.build.activation not in activations:
        raise _mismatch("manifest.build.activation", f"one of {', '.join(activations)}", manifest.build.activation)
    for engine, memory in manifest.memory.items():
        for part, sizes in (("shared", memory.shared), ("own", memory.own)):
            if len(sizes) not in (0, len(manifest.profiles)):
                raise _mismatch(
                    f"manifest.memory.{engine}.{part}", f"{len(manifest.profiles)} numbers, one a profile", list(sizes)
                )
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise EngineMismatchError naming the first file that is missing, altered or not named."""
    for name, digest in sorted(manifest.files.items()):
        path = directory / name
        if not path.is_file():
            raise _mismatch(name, "a file of the bundle", "no such file")
        got = file_digest(path)
        if got != digest:
            raise _mismatch(name, f"SHA-256 {digest}", got)
    present = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()} - {MANIFEST}
    for name in sorted(present - manifest.files.keys()):
        raise _mismatch(name, "only files that the manifest names", "another file")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def require_same(operation: str, given: object, built: object) -> None:
    """Raise EngineMismatchError naming the first field in which two values of one dataclass differ."""
    difference = first_difference(to_json(given), to_json(built), "")
    if difference is not None:
        name, got, expected = difference
        raise EngineMismatchError(operation, name, expected=expected, got=got, hint=_HINT)


def first_difference(left: Any, right: Any, name: str) -> tuple[str, Any, Any] | None:
    """(dotted name, left's value, right's value) of the first difference of two JSON values; None when equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(k for k in right if k not in left)]:
            inner = f"{name}.{key}" if name else str(key)
            if (key in left) != (key in right):
                return inner, left.get(key, "nothing"), right.get(key, "nothing")
            if (found := first_difference(left[key], right[key], inner)) is not None:
                return found
        return None
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = (first_difference(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((found for found in pairs if found is not None), None)
    return None if left == right else (name, left, right)


def to_json(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    return value


def from_json(kind: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type; unknown and missing keys and wrong types raise EngineMismatchError with `name`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, value, name)
    if is_dataclass(kind):
        return _dataclass(kind, value, name)
    if origin is tuple:
        return _tuple(arguments, value, name)
    if origin is dict:
        if not isinstance(value, dict):
            raise _mismatch(name, "an object", type(value).__name__)
        return {k: from_json(arguments[1], v, f"{name}.{k}") for k, v in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _mismatch(name, [member.value for member in kind], value) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind and not (kind is type(None) and value is None):
        raise _mismatch(name, getattr(kind, "__name__", kind), f"{type(value).__name__} {str(value)[:80]}")
    return value


def _dataclass(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(name, "an object", type(value).__name__)
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    for key in [*(k for k in value if k not in names), *(n for n in names if n not in value)]:
        state = ("a known key", "an unknown one") if key in value else ("a value", "none")
        raise _mismatch(f"{name}.{key}", *state)
    return kind(**{n: from_json(hints[n], value[n], f"{name}.{n}") for n in names})


def _tuple(arguments: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _mismatch(name, "a list", type(value).__name__)
    kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
    if len(kinds) != len(value):
        raise _mismatch(name, f"{len(kinds)} entries", len(value))
    return tuple(from_json(k, v, f"{name}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))


def _union(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    """The member that fits; among dataclasses the one with the same keys."""
    for kind in arguments:
        if is_dataclass(kind) and isinstance(value, dict):
            if {f.name for f in fields(kind)} != value.keys():
                continue
            return from_json(kind, value, name)
        try:
            return from_json(kind, value, name)
        except EngineMismatchError:
            continue
    raise _mismatch(name, f"one of {[getattr(k, '__name__', k) for k in arguments]}", type(value).__name__)


def _mismatch(argument: str, expected: object, got: object) -> EngineMismatchError:
    return EngineMismatchError("read bundle", argument, expected=expected, got=got, hint=_HINT)
