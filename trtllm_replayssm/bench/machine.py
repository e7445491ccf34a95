"""What a measurement was made on: GPU, driver, CUDA, commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import torch

from trtllm_replayssm.errors import ConfigError

UNKNOWN = "unknown"


def describe() -> dict[str, str]:
    """Fields of every JSON line; `unknown` where the machine does not say. Raises ConfigError without a CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError("bench kernel", "device", expected="a CUDA device", got="none", hint="Use --list without one")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
    }


def _output(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return UNKNOWN
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else UNKNOWN
