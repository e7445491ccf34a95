"""Options that several commands share, and how they become configs."""

from __future__ import annotations

import argparse

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat

_FORMATS = [fmt.value for fmt in StateFormat]


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """--window, --recurrence, --rounding, --read."""
    group = parser.add_argument_group("recurrent state")
    group.add_argument("--window", type=int, default=16, metavar="L", help="records kept before a flush (default 16)")
    group.add_argument(
        "--recurrence", choices=_FORMATS, default="float32", help="format of the checkpoint that carries the recurrence"
    )
    group.add_argument(
        "--rounding", choices=[r.value for r in Rounding], default="stochastic",
        help="rounding of a recurrence checkpoint below float32 (nearest: for evaluation)",
    )  # fmt: skip
    group.add_argument(
        "--read", choices=_FORMATS, default=None, help="format of a separate copy that serves reads (default: shared)"
    )


def replay_config(arguments: argparse.Namespace, max_step_tokens: int) -> ReplayConfig:
    """The pool settings of the options; ConfigError when they do not fit together."""
    return ReplayConfig(
        window=arguments.window,
        max_step_tokens=max_step_tokens,
        recurrence=StateFormat(arguments.recurrence),
        recurrence_rounding=Rounding(arguments.rounding),
        read=None if arguments.read is None else StateFormat(arguments.read),
    )
