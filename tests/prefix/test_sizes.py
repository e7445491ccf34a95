"""The table of docs/prefix-cache.md is what the shapes give."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.prefix.sizes import prompt_snapshot_bytes
from trtllm_replayssm.weights.presets import preset_geometry, preset_names

PAGE = (ROOT / "docs" / "prefix-cache.md").read_text(encoding="utf-8")
MIB = 1 << 20


@pytest.mark.parametrize("name", preset_names())
def test_the_page_tells_the_bytes_of_each_preset(name: str) -> None:
    geometry = preset_geometry(name)
    size = prompt_snapshot_bytes(geometry, ReplayConfig(max_step_tokens=4), ActivationDtype.BFLOAT16)
    cells = [f"{value / MIB:.2f}" for value in (size.state, size.windows, 64 * size.kv_per_token)]
    row = " | ".join([str(len(geometry.ssm_layers)), *cells, str((16 << 30) // size.total(64))])
    rows = [line for line in PAGE.splitlines() if line.lower().startswith(f"| {name.removesuffix('-nvfp4')} |")]
    assert len(rows) == 1 and row in rows[0], row


def test_the_page_says_how_many_tokens_the_state_of_super_weighs() -> None:
    geometry = preset_geometry("nemotron-3-super-120b-a12b")
    size = prompt_snapshot_bytes(geometry, ReplayConfig(), ActivationDtype.BFLOAT16)
    assert size.state == 160 * MIB and f"{size.state // size.kv_per_token:,} tokens" in PAGE
