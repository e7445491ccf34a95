"""The configurations of lm-evaluation-harness name keys that it documents and endpoints that our server has."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlparse

import pytest

from tests.paths import EXAMPLES, ROOT
from trtllm_replayssm.runtime.evaluation.task_texts import make_tasks

# keys of the harness's docs/config_files.md, of December 2025
KEYS = {
    "model", "model_args", "tasks", "num_fewshot", "batch_size", "max_batch_size", "device", "limit", "samples",
    "use_cache", "cache_requests", "output_path", "log_samples", "predict_only", "apply_chat_template",
    "system_instruction", "fewshot_as_multiturn", "include_path", "gen_kwargs", "seed", "trust_remote_code", "metadata",
}  # fmt: skip
FILES = sorted((EXAMPLES / "lm_eval").glob("*.yaml"))
ENDPOINT = {"local-completions": "/v1/completions", "local-chat-completions": "/v1/chat/completions"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_configuration_fits_the_harness_and_the_server(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(config) <= KEYS
    route = urlparse(config["model_args"]["base_url"]).path
    assert route == ENDPOINT[config["model"]]
    server = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "runtime" / "server").rglob("*.py"))
    assert f'"{route}"' in server
    assert path.name in (path.parent / "README.md").read_text(encoding="utf-8")


def test_there_are_configurations() -> None:
    assert len(FILES) == 3


def test_the_local_task_asks_what_the_generated_tasks_ask() -> None:
    yaml = pytest.importorskip("yaml")
    folder = EXAMPLES / "lm_eval" / "tasks"
    task = yaml.safe_load((folder / "recall.yaml").read_text(encoding="utf-8"))
    data = ROOT / task["dataset_kwargs"]["data_files"]["test"]
    questions = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    made = [t for t in make_tasks(32) if t.name == "recall"]
    assert [q["text"] for q in questions] == [t.text.strip("\n") for t in made]
    assert [q["choices"][q["gold"]] + "." for q in questions] == [t.answer for t in made]
    assert all(len(set(q["choices"])) == 6 for q in questions)
    local = yaml.safe_load((EXAMPLES / "lm_eval" / "local.yaml").read_text(encoding="utf-8"))
    assert local["tasks"] == [task["task"]] and ROOT / local["include_path"] == folder
