"""Builds the parts of a bundle for GPUs that share a model, one rank after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.build import BuildReport, Progress, build
from trtllm_replayssm.builders.destination import new_directory
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import Parameters
from trtllm_replayssm.bundle_parts import rank_folder


def build_ranks(
    parameters: Parameters, pretrained_config: Mapping[str, Any], destination: str | Path, options: BuildOptions, *,
    ranks: Sequence[int], tokenizer: Path | None = None, with_weights: bool = True,
    plugin_library: str | Path | None = None, progress: Progress | None = None,
) -> tuple[BuildReport, ...]:  # fmt: skip
    """A folder in `destination` for each of `ranks`; the other arguments and errors as in `build`."""
    reports: list[BuildReport] = []
    with new_directory("build", Path(destination)) as work:
        for rank in ranks:
            finished = sum(len(report.records) for report in reports)

            def tick(what: str, done: int, rank: int = rank, finished: int = finished) -> None:
                if progress is not None:
                    progress(f"rank {rank}: {what}", finished + done)

            report = build(
                parameters, pretrained_config, work / rank_folder(rank), replace(options, tp_rank=rank),
                tokenizer=tokenizer, with_weights=with_weights, progress=tick,
                plugin_library=None if reports else plugin_library,  # the registry keeps what it has loaded
            )  # fmt: skip
            reports.append(report)
    return tuple(reports)
