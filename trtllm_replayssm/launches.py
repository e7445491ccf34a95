"""Launch constants of the update that were measured to be better than the native library's own choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from trtllm_replayssm.checks import require_positive, require_type
from trtllm_replayssm.errors import ConfigError

LARGEST = (1 << 31) - 1  # the library's numbers are int32


class UpdateKernel(IntEnum):
    """RSSM_UPDATE_PLAIN and the others of update.h."""

    PLAIN = 1
    DIRECT = 2
    STREAMED = 3
    PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLaunch:
    """What a step asks of its launch; a number of 0 is the library's choice. The fields of rssm_update_launch.

    Which numbers a kernel takes, and how large they may be, the library says where the step's sizes are known.
    """

    kernel: UpdateKernel
    multiprocessors: int = 0
    run_heads: int = 0
    piece_heads: int = 0
    drawn_rounds: int = 0
    stages: int = 0

    def __post_init__(self) -> None:
        require_type("UpdateLaunch", "kernel", self.kernel, UpdateKernel)
        for name, value in self._given().items():
            require_positive("UpdateLaunch", name, value, most=LARGEST)

    @property
    def numbers(self) -> list[int]:
        """All fields in the order of the struct."""
        return [int(getattr(self, field.name)) for field in fields(self)]

    def entry(self) -> dict[str, Any]:
        """As a JSON object, without what the library chooses."""
        return {"kernel": self.kernel.name.lower(), **self._given()}

    @staticmethod
    def of_entry(entry: object) -> UpdateLaunch:
        """What `entry` wrote. Raises ConfigError for anything else."""
        names = {kernel.name.lower(): kernel for kernel in UpdateKernel}
        known = {field.name for field in fields(UpdateLaunch)}
        given = entry if isinstance(entry, Mapping) and set(entry) <= known else {}
        kernel = given.get("kernel")
        if not isinstance(kernel, str) or kernel not in names:
            raise ConfigError("UpdateLaunch", "entry", expected=f"kernel ({', '.join(names)}) and numbers", got=entry)
        return UpdateLaunch(**{**given, "kernel": names[kernel]})

    def __str__(self) -> str:
        return " ".join([self.kernel.name.lower(), *(f"{name} {value}" for name, value in self._given().items())])

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kernel"}
        return {name: value for name, value in values.items() if value != 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The launch that a step takes. The fields of rssm_update_plan; see update.h.

    kernel: an UpdateKernel, 0: nothing to launch. threads, shared_bytes: of a CTA. STREAMED: `rounds` runs of
    run_heads to each worker, then `pieces` of piece_heads, the last single_heads of them of one head. PARTS:
    piece_heads of a CTA.
    """

    kernel: int
    ctas: int
    threads: int
    shared_bytes: int
    stages: int
    workers: int
    rounds: int
    run_heads: int
    pieces: int
    piece_heads: int
    single_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLaunch:
    """A launch for steps of exactly `rows` rows, padding counted, of `tokens` tokens each."""

    rows: int
    tokens: int
    launch: UpdateLaunch

    def __post_init__(self) -> None:
        require_positive("TunedLaunch", "rows", self.rows, most=LARGEST)
        require_positive("TunedLaunch", "tokens", self.tokens, most=LARGEST)
        require_type("TunedLaunch", "launch", self.launch, UpdateLaunch)
