"""Flags are spelled with dashes or underscores, in every command; values keep theirs."""

from __future__ import annotations

import argparse
import json

import pytest

from tests.paths import EXAMPLES, ROOT
from trtllm_replayssm.cli import build_parser, dashed, main

MODEL = str(ROOT / "tests" / "checkpoints" / "qwen-moe")


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_no_command_registers_a_flag_that_the_spelling_would_hide() -> None:
    found = commands()
    assert {"serve", "chat", "generate", "quantize", "inspect"} <= found.keys()
    for parser in found.values():
        for action in parser._actions:
            assert dashed(action.option_strings) == list(action.option_strings)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["--max_tokens", "a_b"], ["--max-tokens", "a_b"]),
        (["--api_key=a_b=c_d"], ["--api-key=a_b=c_d"]),
        (["a_b", "-x_y", "---"], ["a_b", "-x_y", "---"]),
        (["--a_b", "--", "--c_d"], ["--a-b", "--", "--c_d"]),
        ([], []),
    ],
)
def test_only_names_are_respelled(given: list[str], taken: list[str]) -> None:
    assert dashed(given) == taken


@pytest.mark.parametrize("flags", [("--max-tokens", "--top-k"), ("--max_tokens", "--top_k")])
def test_a_command_runs_with_either(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(EXAMPLES / "qwen3_5-tiny-nvfp4"), "--prompt", "A_B", "--json"]
    assert main([*command, flags[0], "3", f"{flags[1]}=1"]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    assert len(request["choices"][0]["token_ids"]) == 3 and request["prompt"] == "A_B"


@pytest.mark.parametrize("command", ["serve MODEL", "inspect MODEL", "bench throughput MODEL --dataset FILE"])
def test_an_unknown_flag_is_answered_with_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--no_such_flag", "1"])
    error, name = capsys.readouterr().err, "trtllm-replayssm " + command.partition(" MODEL")[0]
    assert stopped.value.code == 2 and error.startswith(f"usage: {name} [-h]")
    assert error.endswith(f"{name}: error: unrecognized arguments: --no-such-flag 1\n")


@pytest.mark.parametrize("flag", ["--max_seq_len", "--max-seq-len"])
def test_serve_takes_either(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", MODEL, "--port", "0", flag, "1"]) == 1
    assert "max_seq_len" in capsys.readouterr().err
