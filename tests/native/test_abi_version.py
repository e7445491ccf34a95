"""The version of the C ABI: raised with every change of its surface; a library of another one is refused by name."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native import harness
from tests.native.test_abi_mirror import CONSTANTS, INCLUDE, STRUCTS
from trtllm_replayssm.errors import ConfigError, EngineMismatchError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.native_library import load_library

FUNCTION = re.compile(r"RSSM_API\s+((?:const )?\w+\*?\s+rssm_\w+\([^;]*\));")
# Of structs, constants and functions. Another digest is another ABI, and so is another order of packed weights: raise
# RSSM_ABI_VERSION of status.h and ABI_VERSION of records.py, then put the digest here.
SURFACE = {6: "ea0f17a179ecc13c"}

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def surface(headers: Path) -> str:
    """The ABI in words: every struct with its fields' types, every number, every function of the public headers."""
    lines = [f"{name}.{field} {place}" for name, struct in STRUCTS.items() for field, place in places(struct).items()]
    lines += [f"{name} {value}" for name, value in CONSTANTS.items() if name != "RSSM_ABI_VERSION"]
    for path in sorted(headers.glob("*.h")):
        if path.name != "trt.h":  # of the plugin library, which a builder loads by TensorRT's own interface
            lines += [re.sub(r"\s+", " ", text) for text in FUNCTION.findall(path.read_text())]
    return "\n".join(sorted(lines))


def places(struct: type[ctypes.Structure]) -> dict[str, str]:
    """Place and ctypes name of each field."""
    found = {}
    for base in reversed(struct.__mro__):
        for name, kind, *_ in vars(base).get("_fields_", ()):
            found[name] = f"{getattr(struct, name).offset} {kind.__name__}"
    return found


def stub(folder: Path, source: str) -> Path:
    """A shared library of one C source."""
    (folder / "stub.c").write_text(source)
    library = folder / "libreplayssm.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "stub.c"), "-o", str(library)], check=True)
    return library


def test_the_version_was_raised_with_the_surface() -> None:
    text = surface(INCLUDE / "replayssm")
    assert text.count(" rssm_") > 30 and "rssm_update_args.window" in text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == SURFACE[_abi.ABI_VERSION]


def test_a_function_more_is_another_surface(tmp_path: Path) -> None:
    for path in (INCLUDE / "replayssm").glob("*.h"):
        shutil.copy(path, tmp_path)
    assert surface(tmp_path) == surface(INCLUDE / "replayssm")
    with (tmp_path / "commit.h").open("a") as header:
        header.write("RSSM_API rssm_status rssm_other(const rssm_commit_args* args,\n    void* stream);\n")
    assert surface(tmp_path) != surface(INCLUDE / "replayssm")


@needs_gcc
@pytest.mark.parametrize("version", [_abi.ABI_VERSION - 1, _abi.ABI_VERSION + 1])
def test_a_library_of_another_version_is_refused_naming_both(tmp_path: Path, version: int) -> None:
    """It has nothing but its version: no other function may be asked for first."""
    path = stub(tmp_path, f"unsigned rssm_abi_version(void) {{ return {version}u; }}\n")
    with pytest.raises(EngineMismatchError) as refused:
        load_library(path)
    assert refused.value.expected == _abi.ABI_VERSION and refused.value.got == version
    assert str(path) in str(refused.value) and "make native" in str(refused.value)


@needs_gcc
def test_a_library_without_a_version_is_refused(tmp_path: Path) -> None:
    path = stub(tmp_path, "int other(void) { return 0; }\n")
    with pytest.raises(ConfigError, match="rssm_abi_version"):
        load_library(path)


@pytest.mark.skipif(not harness.LIBRARY.exists(), reason=f"no native library at {harness.LIBRARY}")
def test_the_library_refuses_arguments_of_an_older_caller_naming_both() -> None:
    library = _abi.Library(harness.LIBRARY)
    args, record = _abi.CommitArgs(), _abi.ErrorRecord()
    args.struct_size, args.abi_version = ctypes.sizeof(args), _abi.ABI_VERSION - 1
    status = library._handle.rssm_commit(ctypes.byref(args), None, ctypes.byref(record))
    assert status == int(_abi.Status.ABI_MISMATCH)
    newer, older = _abi.ABI_VERSION, _abi.ABI_VERSION - 1
    assert record.message.decode() == f"rssm_commit: abi_version: expected {newer}, got {older}"
