"""The native layers keep their wall: kernels know neither torch nor TensorRT, hosts know only the public headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.rooms import ROOT

PLUGINS = ROOT / "plugins"
SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
HEADER_LINES = 600  # device code that is read as one derivation
LAUNCHER_LINES = 250
PLUGIN_LINES = 350  # a TensorRT plugin's many small methods

FRAMEWORKS = re.compile(r"^(torch|ATen|c10|pybind11|Python\.h|NvInfer)")
KERNEL_SOURCES = re.compile(r"(^|/)kernels/")
KERNELS_BUT_NAMES = re.compile(r"(^|/)kernels/(?!common/)")  # common: thin names for PTX
# folder -> what its files must not include, and why
MUST_NOT_INCLUDE = {
    "include": (FRAMEWORKS, "the public C ABI is plain C"),
    "kernels": (FRAMEWORKS, "a kernel takes pointers"),
    "abi": (FRAMEWORKS, "the ABI takes pointers"),
    "trt": (KERNEL_SOURCES, "hosts use the public headers only"),
    "torch": (KERNEL_SOURCES, "hosts use the public headers only"),
    "bench": (KERNELS_BUT_NAMES, "what is measured is called through the public headers only"),
}
MUST_NOT_CALL = re.compile(
    r"(?<![\w.:>])(?:std::)?(exit|_Exit|abort|printf|cudaDeviceSynchronize|cudaStreamSynchronize|cudaMalloc\w*)\s*\("
)
LIBRARY = ("include", "kernels", "abi", "trt", "torch")  # the benchmark is a program of its own
FILES = sorted(p for p in PLUGINS.rglob("*") if p.suffix in SUFFIXES and "build" not in p.relative_to(PLUGINS).parts)


def code_of(text: str) -> str:
    """C or C++ source without comments and string literals' contents; line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n") if match[0].startswith("/") else '""'

    text = re.sub(r'^(\s*#\s*include\s*)"([^"\n]*)"', r"\1<\2>", text, flags=re.MULTILINE)
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def offences(folder: str, text: str) -> list[str]:
    """What a file of plugins/<folder> includes or calls against the rules."""
    found = []
    pattern, reason = MUST_NOT_INCLUDE.get(folder, (None, ""))
    for number, line in enumerate(code_of(text).splitlines(), start=1):
        include = re.match(r"\s*#\s*include\s*<([^>]+)>", line)
        if include and pattern is not None and pattern.search(include[1]):
            found.append(f"{number}: includes {include[1]}: {reason}")
        call = MUST_NOT_CALL.search(line)
        if call and folder in LIBRARY:
            found.append(f"{number}: calls {call[1]}: the caller owns memory, streams and the process")
    return found


def limit_of(path: Path) -> int:
    """Line limit of one native file."""
    if path.suffix == ".cuh":
        return HEADER_LINES
    return PLUGIN_LINES if path.relative_to(PLUGINS).parts[0] == "trt" else LAUNCHER_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PLUGINS)))
def test_a_native_file_keeps_the_wall_and_the_budget(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert offences(path.relative_to(PLUGINS).parts[0], text) == []
    assert len(text.splitlines()) <= limit_of(path)


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("kernels", "#include <torch/extension.h>"),
        ("abi", '#include "NvInfer.h"'),
        ("trt", '#include "../kernels/ssm/kernel.cuh"'),
        ("kernels", "  cudaDeviceSynchronize();"),
        ("abi", "if (bad) std::abort();"),
        ("trt", "/* fine */ exit(1);"),
        ("kernels", "cudaMallocAsync(&p, n, s);"),
    ],
)
def test_the_check_finds_an_offence(folder: str, text: str) -> None:
    assert len(offences(folder, text)) == 1


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("bench", "std::printf(header); exit(1);"),
        ("kernels", "// never abort(), never exit()\nsnprintf(text, n, format);"),
        ("trt", '#include "replayssm/update.h"\nlog("abort()");'),
        ("abi", '#include "../kernels/common/tensor.cuh"\nerror.exit(1); on_exit(f);'),
    ],
)
def test_an_innocent_file_passes(folder: str, text: str) -> None:
    assert offences(folder, text) == []
