"""What differs between `tensorrt` (data-centre GPUs, plugins) and `tensorrt_rtx` (RTX GPUs, builds without a GPU).

Everything else in this room uses the network API that both share. Neither library is imported before it is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError, UnsupportedError

CURRENT = "current"  # the GPU of this machine
_FLOOR = {"tensorrt": (11, 0), "tensorrt_rtx": (1, 7)}  # attention with lengths and masks, rotary, KV cache update
_FP4_MAJOR = 12  # compute capabilities 12.x on RTX; 10.x on data-centre GPUs
_FP8_FLOOR = (8, 9)


class FlavourName(str, Enum):
    """The two libraries, by the name that Python imports."""

    TENSORRT = "tensorrt"
    RTX = "tensorrt_rtx"


@dataclass(frozen=True, slots=True)
class Flavour:
    """name and target of a build; trt: the imported library. Made by `load`.

    target: compute capability ("8.9", "12.0"), or "current".
    """

    name: FlavourName
    target: str
    trt: Any

    @property
    def segmented(self) -> bool:
        """Whether native operations cut the network, since the library takes no plugins."""
        return self.name is FlavourName.RTX

    @property
    def capability(self) -> tuple[int, int] | None:
        """The target as numbers, None for "current"."""
        return None if self.target == CURRENT else _capability(self.target)

    @property
    def elsewhere(self) -> str | None:
        """What to do where this machine has no GPU to build for; None where nothing can be done."""
        return "Where there is no GPU, name one: --target 12.0" if self.segmented and self.target == CURRENT else None

    def set_target(self, config: Any) -> None:
        """Tell a builder configuration which GPU to build for, and what only one flavour has."""
        if self.name is FlavourName.RTX:
            config.num_compute_capabilities = 1
            config.set_compute_capability(self._rtx_capability(), 0)
            # else a run of the engine may allocate memory, and no CUDA graph could hold it
            config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        else:
            # without it the aliased inputs of plugins are never asked for
            config.set_preview_feature(self.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)

    def create_network(self, builder: Any) -> Any:
        """A network whose types are the ones written, never chosen."""
        return builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    def load_plugins(self, library: Path) -> None:
        """Load a plugin library into the registry. Raises ConfigError where it cannot be."""
        if self.segmented:
            raise ConfigError(
                "build", "plugin_library", expected="none for tensorrt_rtx, which takes no plugins", got=library
            )
        if not library.is_file() or self.trt.get_plugin_registry().load_library(str(library)) is None:
            raise ConfigError(
                "build", "plugin_library", expected="a plugin library that TensorRT loads", got=library,
                hint="Build libtrtllm_replayssm_plugins.so and give its path",
            )  # fmt: skip

    def require(self, *, fp4: bool, fp8: bool) -> None:
        """Raise UnsupportedError when the target lacks a type of the weights."""
        if self.capability is None:
            return  # the builder itself knows the GPU of this machine
        fp4_majors = (_FP4_MAJOR,) if self.name is FlavourName.RTX else (10, _FP4_MAJOR)
        if fp4 and self.capability[0] not in fp4_majors:
            raise self._lacks("FP4", " or ".join(f"{major}.x" for major in fp4_majors))
        if fp8 and self.capability < _FP8_FLOOR:
            raise self._lacks("FP8", "8.9 or newer")

    def _lacks(self, kind: str, needed: str) -> UnsupportedError:
        return UnsupportedError(
            "build", "target", expected=f"compute capability {needed} for the {kind} weights of this checkpoint",
            got=self.target, hint="Build with --weights bf16, which stores them dequantised",
        )  # fmt: skip

    def _rtx_capability(self) -> Any:
        """The library's name of the target."""
        known = self.trt.ComputeCapability.__members__
        name = "CURRENT" if self.capability is None else "SM{}{}".format(*self.capability)
        if name not in known:
            targets = [f"{k[2:-1]}.{k[-1]}" for k in known if k.startswith("SM")]
            raise UnsupportedError(
                "build", "target", expected=f"one of {targets}, which tensorrt_rtx builds for", got=self.target,
                hint="Data-centre GPUs (8.0, 9.0, 10.0) need --flavour tensorrt",
            )  # fmt: skip
        return known[name]


def load(name: FlavourName, target: str) -> Flavour:
    """Import the library and check its version. Raises ConfigError where it is missing or too old."""
    if target != CURRENT:
        _capability(target)
    if name is FlavourName.TENSORRT and target != CURRENT:
        raise ConfigError(
            "build", "target", expected="current: tensorrt builds for the GPU of this machine", got=target,
            hint="Leave --target away, or use --flavour tensorrt_rtx",
        )  # fmt: skip
    try:
        trt = import_module(name.value)
    except ImportError as error:
        package = name.value.replace("_", "-")
        raise ConfigError(
            "build", "flavour", expected=f"an installed {name.value}", got=f"ImportError: {error}",
            hint=f"In a checkout: pip install -e '.[{package}]'",
        ) from error  # fmt: skip
    version = tuple(int(part) for part in re.findall(r"\d+", str(trt.__version__))[:2])
    floor = _FLOOR[name.value]
    if version < floor:
        raise ConfigError(
            "build", "flavour", expected=f"{name.value} {floor[0]}.{floor[1]} or newer", got=trt.__version__
        )
    return Flavour(name, target, trt)


def _capability(target: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", target)
    if match is None:
        raise ConfigError("build", "target", expected='a compute capability such as "12.0", or current', got=target)
    return int(match[1]), int(match[2])
