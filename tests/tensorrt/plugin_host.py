"""Finding the plugin library, TensorRT's public headers and lean runtimes, and building the C++ host of the tests.

Environment:
    REPLAYSSM_PLUGIN_LIBRARY           the plugin library, default build/native/libtrtllm_replayssm_plugins.so
    REPLAYSSM_TENSORRT_INCLUDE_DIRS    header folders, one per TensorRT major version, separated by ":"
    REPLAYSSM_TENSORRT_LEAN_LIBRARIES  libnvinfer_lean.so.* files, likewise
    REPLAYSSM_SANITIZER                runs the host, such as `compute-sanitizer --error-exitcode 9`
    CUDA_HOME                          the CUDA toolkit, default /usr/local/cuda
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "host"
LIBRARY = Path(os.environ.get("REPLAYSSM_PLUGIN_LIBRARY", ROOT / "build" / "native" / "libtrtllm_replayssm_plugins.so"))
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def _paths(variable: str) -> list[Path]:
    return [Path(part) for part in os.environ.get(variable, "").split(":") if part]


@dataclass(frozen=True)
class Headers:
    """One folder of TensorRT's public headers and its major version."""

    folder: Path
    major: int


def headers() -> list[Headers]:
    """The header folders the environment names."""
    found = []
    for folder in _paths("REPLAYSSM_TENSORRT_INCLUDE_DIRS"):
        text = (folder / "NvInferVersion.h").read_text()
        major = re.search(r"#define (?:TRT_MAJOR_ENTERPRISE|NV_TENSORRT_MAJOR) (\d+)", text)
        assert major is not None, f"no major version in {folder}/NvInferVersion.h"
        found.append(Headers(folder, int(major[1])))
    return found


def lean_libraries(major: int) -> list[Path]:
    """The lean runtimes of one major version."""
    return [path for path in _paths("REPLAYSSM_TENSORRT_LEAN_LIBRARIES") if path.name.endswith(f".so.{major}")]


def unavailable() -> str | None:
    """Why the plugin tests cannot run here, in one line, or None."""
    if not LIBRARY.exists():
        return f"no plugin library at {LIBRARY} (cmake with -DTENSORRT_INCLUDE_DIR builds it)"
    if not headers():
        return "no TensorRT headers: REPLAYSSM_TENSORRT_INCLUDE_DIRS is not set"
    if shutil.which("g++") is None:
        return "no g++"
    return None if (CUDA / "include" / "cuda_runtime_api.h").exists() else f"no CUDA headers in {CUDA}/include"


def build(folder: Path, version: Headers) -> Path:
    """Compile the host against one version of the headers."""
    binary = folder / f"plugin_host{version.major}"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(SOURCES)]
    command += ["-I", str(ROOT / "plugins" / "include"), "-isystem", str(CUDA / "include")]
    command += ["-isystem", str(version.folder), *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(binary)]
    command += ["-L", str(CUDA / "lib64"), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    subprocess.run(command, check=True)
    return binary


def build_example(folder: Path, version: Headers) -> Path:
    """Compile the example that times decode steps against one version of the headers."""
    binary = folder / "decode_step"
    environment = {**os.environ, "TENSORRT_INCLUDE_DIR": str(version.folder), "CUDA_HOME": str(CUDA)}
    subprocess.run(["bash", str(ROOT / "examples" / "cpp" / "build.sh"), str(binary)], env=environment, check=True)
    return binary


def loaded(stem: str) -> Path:
    """The shared library of that name which this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in maps if Path(line.split()[-1]).name.startswith(f"{stem}.so"))


def run(binary: Path, *arguments: str) -> str:
    """Run the host over the plugin library; what it printed. Fails with its output when a check failed."""
    command = [*os.environ.get("REPLAYSSM_SANITIZER", "").split(), str(binary), str(LIBRARY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
