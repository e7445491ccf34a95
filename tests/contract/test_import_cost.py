"""`import trtllm_replayssm` is quick and loads no framework; its public names resolve when they are asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import trtllm_replayssm
from tests.contract.rooms import PACKAGE, ROOT
from trtllm_replayssm import _LAZY

SECONDS = 1.0
HEAVY = {"torch", "transformers", "tensorrt", "tensorrt_rtx", "numpy", "tokenizers", "safetensors", "cuda"}


def run(code: str, cwd: Path | str = "/") -> Any:
    """The JSON that `code` prints in a fresh interpreter started in `cwd`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_package_is_quick_and_loads_no_framework() -> None:
    code = (
        "import json, sys, time\nt = time.perf_counter()\nimport trtllm_replayssm as p\nt = time.perf_counter() - t\n"
        "print(json.dumps([t, sorted({m.partition('.')[0] for m in sys.modules}), p.__version__]))"
    )
    seconds, modules, version = run(code)
    assert HEAVY.isdisjoint(modules)
    assert seconds < SECONDS
    assert version == trtllm_replayssm.__version__


@pytest.mark.parametrize("cwd", ["/", str(ROOT), str(ROOT / "tests")])
def test_the_rooms_import_by_their_long_names_from_anywhere(cwd: str) -> None:
    code = (
        "import json, trtllm_replayssm.runtime as r, trtllm_replayssm.builders as b\n"
        "print(json.dumps([r.__name__, b.__name__, r.__file__, b.__file__]))"
    )
    runtime, builders, *files = run(code, cwd)
    assert (runtime, builders) == (f"{PACKAGE}.runtime", f"{PACKAGE}.builders")
    assert [Path(f).name for f in files] == ["__init__.py", "__init__.py"]


def test_public_names_are_listed_once_and_in_full() -> None:
    assert set(trtllm_replayssm.__all__) == {*_LAZY, "__version__"}
    assert set(trtllm_replayssm.__all__) <= set(dir(trtllm_replayssm))


@pytest.mark.parametrize("name", sorted(_LAZY))
def test_a_public_name_resolves_to_its_module(name: str) -> None:
    module = _LAZY[name]
    assert find_spec(module) is not None
    assert getattr(trtllm_replayssm, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = trtllm_replayssm.Llm


def test_a_checkout_that_is_not_installed_says_how_to_install(tmp_path: Path) -> None:
    """With a wheel installed, a shell in the checkout's root finds the package there, but not its rooms."""
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import json, sys\nsys.meta_path = [f for f in sys.meta_path if 'ditable' not in str(f)]\n"
        "import trtllm_replayssm as p\n"
        "try:\n    p.LLM\nexcept ImportError as e:\n    print(json.dumps(str(e)))"
    )
    assert "pip install -e ." in run(code, tmp_path)
