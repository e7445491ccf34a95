"""Where a result file comes from: machine, versions, commit and command. Not part of what two runs must share."""

from __future__ import annotations

import argparse
import platform
from typing import TYPE_CHECKING

from trtllm_replayssm._version import __version__

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.evaluation.forcing import Model


def origin(arguments: argparse.Namespace, model: Model) -> dict[str, str]:
    """Fields of a result file's `meta`; `unknown` where the machine does not say.

    device_name: of the GPU, or the processor's kind; command: the command line that is running.
    """
    from trtllm_replayssm.bench.machine import describe

    found = describe(model.device)
    gpu = found.pop("gpu")
    name = gpu if model.device.type == "cuda" else platform.machine()
    return {"device_name": name, **found, "version": __version__, "command": arguments.command_line}
