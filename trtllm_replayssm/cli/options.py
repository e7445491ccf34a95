"""Options that several commands share, and how they become configs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.options import SpeculativeConfig

ACTIVATIONS = [dtype.value for dtype in ActivationDtype]
_FORMATS = [fmt.value for fmt in StateFormat]


def require_positive_flags(command: str, arguments: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError, by its flag, for a number that was given and is below one."""
    for name in names:
        if getattr(arguments, name) is not None:
            require_positive(command, f"--{name.replace('_', '-')}", getattr(arguments, name))


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


def add_drafter_options(parser: argparse.ArgumentParser) -> None:
    """--drafter, --draft-len."""
    group = parser.add_argument_group("speculative decoding")
    group.add_argument("--drafter", choices=["none", "mtp", "ngram"], default="none", help="where drafts come from")
    group.add_argument("--draft-len", type=int, default=3, help="drafts of one step (default 3)")


def speculative_config(arguments: argparse.Namespace) -> SpeculativeConfig | None:
    """The drafter of the options, None for plain decoding; ConfigError when they do not fit together."""
    from trtllm_replayssm.runtime.options import MTPDecodingConfig, NGramDecodingConfig

    if arguments.drafter == "none":
        return None
    if arguments.drafter == "mtp":
        return MTPDecodingConfig(max_draft_len=arguments.draft_len)
    return NGramDecodingConfig(max_draft_len=arguments.draft_len)
