"""Values of flags that argparse takes as text: lists of integers, ranges of layers."""

from __future__ import annotations

import re

from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import ConfigError


def integers(command: str, flag: str, text: str, *, least: int = 1) -> list[int]:
    """Integers of at least `least`, comma separated. Raises ConfigError."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,18}", part, re.ASCII) and int(part) >= least for part in parts):
        raise ConfigError(command, flag, expected=f"integers of at least {least}, comma separated", got=shown(text))
    return [int(part) for part in parts]


def layer_range(command: str, text: str | None) -> tuple[int, int] | None:
    """First and last layer of FIRST-LAST, None where nothing was given. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    if match is None:
        raise ConfigError(command, "--layers", expected='FIRST-LAST, such as "0-3"', got=shown(text))
    return int(match[1]), int(match[2])
