"""What the commands say: the product's own messages at the level asked for, and one line about what is wrong."""

from __future__ import annotations

import json
import logging
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import EXAMPLES
from tests.server.harness import COMMAND, SMALLEST, free_port, process
from trtllm_replayssm.cli import main

STATE = "recurrent state: float32, as the checkpoint's configuration says"
NEAREST = "replayssm: {recurrence: fp8, rounding: nearest}\nkv_cache_config: null\n"


@pytest.mark.parametrize(
    ("level", "told", "warned"), [("info", True, True), ("warning", False, True), ("error", False, False)]
)
def test_the_level_is_that_of_the_products_own_messages_too(
    tmp_path: Path, level: str, told: bool, warned: bool
) -> None:
    (tmp_path / "nearest.yaml").write_text(NEAREST)
    with process(SMALLEST, "--log_level", level) as server:
        server.process.terminate()
        logs = server.logs()
    assert (f"INFO:     {STATE}" in logs) == told
    assert ("INFO:     device: cpu, as none is set" in logs) == told
    assert ("response_format is not served" in logs) == told  # this checkpoint has no tokenizer
    assert ("stopping: new requests get 503" in logs) == warned
    with process(SMALLEST, "--log_level", level, "--config", str(tmp_path / "nearest.yaml")) as server:
        server.process.terminate()
        assert ("WARNING:     recurrent state: fp8 rounded to nearest" in server.logs()) == warned


def test_a_command_that_ended_leaves_no_handler_behind(capsys: Any) -> None:
    before = list(logging.getLogger("trtllm_replayssm").handlers)
    assert main(["serve", str(SMALLEST), "--port", "0", "--max_seq_len", "1"]) == 1
    assert logging.getLogger("trtllm_replayssm").handlers == before
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--chat_template", "/nope"], ("serve: chat_template: expected", "got /nope: No such file")),
        (["--api_key_file", "/nope"], ("serve: api_key_file: expected", "got /nope: No such file")),
        (["--config", "{ngram}"], ("serve: speculative_config.max_draft_len: expected", "got nothing. Write")),
    ],
)
def test_an_error_names_the_flag_or_key(tmp_path: Path, flags: list[str], parts: tuple[str, ...], capsys: Any) -> None:
    (tmp_path / "ngram.yaml").write_text("speculative_config: {decoding_type: NGram}\n")
    flags = [flag.format(ngram=tmp_path / "ngram.yaml") for flag in flags]
    assert main(["serve", str(SMALLEST), *flags]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in parts)


def test_chat_and_replay_name_the_server_that_is_not_there(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "x", "output_tokens": 1}))
    replay = [sys.executable, str(EXAMPLES / "serve" / "replay.py"), url, str(data)]
    for command in ([*COMMAND, "chat", url], replay):
        done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and done.stderr.strip().count("\n") == 0, done.stderr
        assert url.removeprefix("http://") in done.stderr and "refused" in done.stderr


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([2.0, 1.0], 0.5, 1.0), ([2.0, 1.0], 0.9, 2.0), ([1.0, 2.0, 3.0], 0.5, 2.0), ([4.0], 0.99, 4.0)],
)
def test_percentiles_of_few_requests_are_theirs(values: list[float], share: float, expected: float) -> None:
    percentile = runpy.run_path(str(EXAMPLES / "serve" / "replay.py"))["percentile"]
    assert percentile(values, share) == expected
