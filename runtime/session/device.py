"""Which torch device a session runs on."""

from __future__ import annotations

import torch

from trtllm_replayssm.errors import ConfigError

_ALONE = "Let the process see that GPU alone, by CUDA_VISIBLE_DEVICES"


def usable_device(name: str, *, otherwise: str = "Use cpu, or install") -> torch.device:
    """A device that this torch can use. Raises ConfigError for an unknown one, for CUDA without a GPU, and for another
    GPU than the thread's current one: kernels are launched there.

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
    if device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device():
        raise ConfigError(
            "session", "device", expected=f"cuda, which is cuda:{torch.cuda.current_device()} here", got=repr(name),
            hint=_ALONE,
        )  # fmt: skip
    return device


def require_first_gpu() -> None:
    """Raise ConfigError where the thread's current GPU is not the first one, as it is for threads that begin."""
    if torch.cuda.is_available() and torch.cuda.current_device() != 0:
        raise ConfigError(
            "LLM", "device", expected="the first GPU that the process sees, as the engine has a thread of its own",
            got=f"cuda:{torch.cuda.current_device()} as the current one", hint=_ALONE,
        )  # fmt: skip
