"""The pool configurations an evaluation compares, by name: `shared-fp8-sr-L16`, `separate-nvfp4-fp16-sr-L16`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError

_FORMATS = {
    "fp32": StateFormat.FLOAT32, "fp16": StateFormat.FLOAT16, "fp8": StateFormat.FP8, "nvfp4": StateFormat.NVFP4,
}  # fmt: skip
_ROUNDINGS = {"sr": Rounding.STOCHASTIC, "rtn": Rounding.NEAREST}
_FORMAT = "|".join(_FORMATS)
_NAME = re.compile(rf"(?:shared|separate-(?P<read>{_FORMAT}))-(?P<recurrence>{_FORMAT})(?:-(?P<rounding>sr|rtn))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A pool format (`formats`, as in the paper's legends) at a window L.

    step_tokens: tokens of the widest step (lowered to the window). See `ForcedDecoding` for why it changes no result.
    """

    formats: str
    window: int
    step_tokens: int = 1

    def __post_init__(self) -> None:
        match = _NAME.fullmatch(self.formats)
        if match is None or (match["recurrence"] == "fp32") is not (match["rounding"] is None):
            raise ConfigError(
                "eval", "formats",
                expected="shared-FORMAT or separate-READ-FORMAT, with -sr or -rtn where FORMAT is below fp32",
                got=repr(self.formats), hint=f"Formats are {', '.join(_FORMATS)}: shared-fp8-sr, separate-nvfp4-fp32",
            )  # fmt: skip
        if match["read"] and self.window == 1:
            raise ConfigError(
                "eval", "window", expected="at least 2 with a separate read copy", got=1,
                hint="At L = 1 every step flushes and reads the recurrence checkpoint",
            )  # fmt: skip

    @property
    def name(self) -> str:
        """Formats and window."""
        return f"{self.formats}-L{self.window}"

    @property
    def replay(self) -> ReplayConfig:
        """The pool's settings."""
        match = _NAME.fullmatch(self.formats)
        assert match is not None, "checked when made"
        return ReplayConfig(
            window=self.window,
            max_step_tokens=max(1, min(self.step_tokens, self.window - 1)),
            recurrence=_FORMATS[match["recurrence"]],
            recurrence_rounding=_ROUNDINGS[match["rounding"] or "sr"],
            read=_FORMATS[match["read"]] if match["read"] else None,
        )

    @property
    def stochastic(self) -> bool:
        """Whether a seed changes its results."""
        return self.formats.endswith("-sr")


def parse_configuration(name: str, step_tokens: int = 1) -> Configuration:
    """`FORMATS-LWINDOW` -> configuration."""
    formats, separator, window = name.rpartition("-L")
    if not separator or not window.isdecimal() or int(window) < 1:
        raise ConfigError("eval", "configuration", expected="FORMATS-LWINDOW, like shared-fp8-sr-L16", got=repr(name))
    return Configuration(formats=formats, window=int(window), step_tokens=step_tokens)
