"""The configurations of lm-evaluation-harness name keys that it documents and endpoints that our server has."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlparse

import pytest

from tests.paths import EXAMPLES, ROOT

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
    assert len(FILES) == 2
