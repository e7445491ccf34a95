"""What a measurement was made on: GPU, driver, CUDA, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from trtllm_replayssm.errors import ConfigError

UNKNOWN = "unknown"
COMMIT_VARIABLE = "REPLAYSSM_COMMIT"  # names the commit of a copy without its repository
_DESCRIBE = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def describe(device: torch.device | None = None) -> dict[str, str]:
    """Fields of every JSON line; `unknown` where the machine does not say.

    device: what was measured on, None: the current CUDA device, and ConfigError where there is none.
    """
    commit = {"commit": os.environ.get(COMMIT_VARIABLE) or _output(*_DESCRIBE)}
    if device is not None and device.type == "cpu":
        return {"gpu": f"none ({platform.machine()} CPU)", "driver": "none", "torch": torch.__version__, **commit}
    if not torch.cuda.is_available():
        raise ConfigError(
            "measure", "device", expected="a CUDA device", got="none",
            hint="Measure on a machine with a GPU; bench kernel --list and tune without --measure need none",
        )  # fmt: skip
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        **commit,
    }


def _output(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return UNKNOWN
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else UNKNOWN
