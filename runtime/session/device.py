"""Which torch device a session runs on."""

from __future__ import annotations

import torch

from trtllm_replayssm.errors import ConfigError


def usable_device(name: str, *, otherwise: str = "Use cpu, or install") -> torch.device:
    """A device that this torch can use. Raises ConfigError for an unknown one, or for CUDA without a GPU.

    otherwise: how the hint begins, before "a CUDA build of torch on a machine with a GPU".
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("session", "device", expected="cpu, cuda or cuda:N", got=repr(name)) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "session", "device", expected="cpu, or cuda where torch sees a GPU", got=f"{name!r} without one",
            hint=f"{otherwise} a CUDA build of torch on a machine with a GPU",
        )  # fmt: skip
    return device
