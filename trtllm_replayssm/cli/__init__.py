"""The command line `trtllm-replayssm`: argument parsing and printing only.

Exit codes: 0 done, 1 an error of ours (one line on stderr), 2 wrong usage, 130 interrupted (by SIGTERM 143
and by SIGHUP 129, where what is half written is removed), 141 nobody reads the output.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

import trtllm_replayssm.cli.bench as bench_command
import trtllm_replayssm.cli.build as build_command
import trtllm_replayssm.cli.chat as chat_command
import trtllm_replayssm.cli.evaluate as evaluate_command
import trtllm_replayssm.cli.generate as generate_command
import trtllm_replayssm.cli.inspect as inspect_command
import trtllm_replayssm.cli.plan as plan_command
import trtllm_replayssm.cli.quantize as quantize_command
import trtllm_replayssm.cli.serve as serve_command
import trtllm_replayssm.cli.tune as tune_command
from trtllm_replayssm._version import __version__
from trtllm_replayssm.cli.stopping import StoppedError
from trtllm_replayssm.errors import ReplaySSMError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 128 + signal.SIGPIPE


class _Command(argparse.ArgumentParser):
    """A parser, and those of its commands, that answers an unknown flag with its own usage, not with its parent's."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See the base class; nothing is unknown in what returns."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = _Command(
        prog="trtllm-replayssm",
        description="Decode hybrid state-space language models with ReplaySSM.",
        epilog="Exit codes: 0 done, 1 error (one line on stderr), 2 wrong usage, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (
        serve_command, chat_command, generate_command, quantize_command, build_command, inspect_command, plan_command,
        bench_command, evaluate_command, tune_command,
    ):  # fmt: skip
        module.add_command(commands)
    return parser


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes in the names of flags, where underscores mean the same; values stay as they are."""
    end = argv.index("--") if "--" in argv else len(argv)
    spelled = []
    for argument in argv[:end]:
        name, equals, value = argument.partition("=")
        spelled.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return [*spelled, *argv[end:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = dashed(sys.argv[1:] if argv is None else argv)
    known = argparse.Namespace(command_line=shlex.join(["trtllm-replayssm", *given]))  # results say what made them
    arguments = build_parser().parse_args(given, known)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except ReplaySSMError as error:
        sys.stderr.write(f"trtllm-replayssm: {error}\n")
        return EXIT_ERROR
    except BrokenPipeError:  # nobody reads our output (`| head`): what is left of it goes nowhere, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        sys.stderr.write(f"trtllm-replayssm: {error.strerror or error}{where}\n")
        return EXIT_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("trtllm-replayssm: interrupted\n")
        return EXIT_INTERRUPTED
    except StoppedError as stopped:
        sys.stderr.write(f"trtllm-replayssm: stopped by {signal.Signals(stopped.number).name}\n")
        return 128 + stopped.number
