"""Records what the Python bindings of the full `tensorrt` offer, without its libraries or a GPU.

    python -m tests.tools.record_signatures WHEEL tests/builders/tensorrt_signatures.json

WHEEL is a `tensorrt_cu13_bindings` wheel for this interpreter. The bindings load over three stub libraries, whose few
functions return null: enough to read classes, methods and enumerations, not to build anything. Needs gcc. Never run in
CI; the file that it writes is committed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = {
    "libnvinfer.so.11": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "libnvinfer_plugin.so.11": ("initLibNvInferPlugins",),
    "libnvonnxparser.so.11": (
        "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion",
    ),
}  # fmt: skip
PACKAGE = "tensorrt_bindings"
CLASSES = re.compile(
    r"^(Builder|I\w*Layer|IAttention|INetworkDefinition|IBuilderConfig|IOptimizationProfile|ITensor|Weights|Runtime|"
    r"ICudaEngine|IExecutionContext|IPluginRegistry|IPluginCreator\w*|PluginField\w*|ILogger|IProgressMonitor|"
    r"IStreamWriter)$"
)


def record() -> dict[str, Any]:
    """Signatures by class and method, attributes, and members of enumerations, of the bindings on sys.path."""
    trt = import_module(PACKAGE)
    classes, enums = offered(trt)
    functions = {name: _signatures(getattr(trt, name)) for name in ("get_plugin_registry", "init_libnvinfer_plugins")}
    return {"version": trt.__version__, "classes": classes, "enums": enums, "functions": functions}


def offered(trt: ModuleType) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """(class -> methods and attributes, enumeration -> members) of one module of bindings."""
    classes: dict[str, Any] = {}
    enums: dict[str, list[str]] = {}
    for name, kind in sorted(vars(trt).items()):
        if hasattr(kind, "__members__"):
            enums[name] = sorted(kind.__members__)
        elif isinstance(kind, type) and CLASSES.match(name):
            classes[name] = _members(kind)
    return classes, enums


def _members(kind: type) -> dict[str, Any]:
    methods: dict[str, list[str]] = {}
    attributes: list[str] = []
    for name in sorted(dir(kind)):
        if name.startswith("_") and name != "__init__":
            continue
        member = getattr(kind, name)
        if isinstance(member, property):
            attributes.append(name)
        elif callable(member) and not hasattr(member, "__members__"):
            methods[name] = _signatures(member)
    return {"methods": methods, "attributes": attributes}


def _signatures(member: Any) -> list[str]:
    """`name(arguments) -> result` lines of a bound function's docstring, types without their module."""
    lines = (line.strip() for line in (member.__doc__ or "").splitlines())
    found = [re.sub(r"^\d+\. ", "", line) for line in lines]
    pattern = rf"{re.escape(member.__name__)}\((?!\*args, \*\*kwargs\)).* -> "
    return [re.sub(r"\b\w+_bindings\.\w+\.|typing\.", "", line) for line in found if re.match(pattern, line)]


def _make_stubs(folder: Path) -> None:
    for library, functions in LIBRARIES.items():
        code = "".join(f"void* {function}(void) {{ return 0; }}\n" for function in functions)
        (folder / "stub.c").write_text(code, encoding="utf-8")
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / library), "stub.c"]
        subprocess.run(command, check=True, cwd=folder)


def main() -> None:
    """Record in a second process, which finds the stubs."""
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(json.dumps(record(), indent=0) + "\n", encoding="utf-8")
        return
    wheel, output = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zipfile.ZipFile(wheel).extractall(folder)
        _make_stubs(folder)
        environment = {**os.environ, "LD_LIBRARY_PATH": name, "PYTHONPATH": f"{name}:{Path.cwd()}"}
        command = [sys.executable, "-m", "tests.tools.record_signatures", str(output)]
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
