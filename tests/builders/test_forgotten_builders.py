"""A builder that is garbage when the next one is made: the library logs under a lock that its destructor takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

# a collection may come at any allocation: here it comes while the library logs, where it may come at all
CODE = """
import gc
import tensorrt_rtx
from trtllm_replayssm.builders import compiler
from trtllm_replayssm.builders.compiler import Compiler
from trtllm_replayssm.builders.flavour import FlavourName, load

class Holder: pass

class Logger(tensorrt_rtx.ILogger):
    logged = 0
    def __init__(self):
        tensorrt_rtx.ILogger.__init__(self)
    def log(self, severity, text):
        Logger.logged += 1
        if gc.isenabled():
            gc.collect()

compiler._logger = lambda trt, messages: Logger()
flavour = load(FlavourName.RTX, "12.0")
def make():
    return Compiler(flavour, {}, slots=1, activation="float32", tick=lambda: None)

gc.disable()
forgotten = Holder()
forgotten.itself, forgotten.compiler = forgotten, make()
del forgotten
gc.set_threshold(0)
gc.enable()
before = Logger.logged
second = make()
print("made", Logger.logged > before)
"""


def test_the_next_builder_is_made() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "made True\n", done.stderr
