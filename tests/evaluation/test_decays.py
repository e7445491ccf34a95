"""Measured decays are those the layers were given, and their description counts them right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.evaluation.small import PROMPT, random_streams, small_model
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops.reference import gdn, mamba2
from trtllm_replayssm.runtime.evaluation.decays import describe_decays, measure_decays, saving_by_decay
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.traffic import state_bytes, window_bytes_per_token


@pytest.mark.parametrize("name", ["nemotron-dense", "qwen-dense"])
def test_decays_are_the_ones_the_layers_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = small_model(name), []
    streams = random_streams(model, 2, PROMPT + 24)
    inner = {"mamba2": mamba2.mamba2_update, "gdn": gdn.gdn_update}

    def mamba2_update(state, cursors, rows, x, k, q, dt, a, **options):  # type: ignore[no-untyped-def]
        given.append((dt * a).double())
        return inner["mamba2"](state, cursors, rows, x, k, q, dt, a, **options)

    def gdn_update(state, cursors, rows, q, k, v, g, beta, **options):  # type: ignore[no-untyped-def]
        given.append(g.double())
        return inner["gdn"](state, cursors, rows, q, k, v, g, beta, **options)

    monkeypatch.setattr(mamba2, "mamba2_update", mamba2_update)
    monkeypatch.setattr(gdn, "gdn_update", gdn_update)
    found = measure_decays(model, streams, PROMPT, 24, lambda tokens: None)
    layers = len(model.checkpoint.geometry.ssm_layers)
    by_layer = [torch.cat(given[i::layers], dim=1) for i in range(layers)]  # [rows, tokens, H] each
    want = torch.stack(by_layer).permute(2, 0, 1, 3).numpy()
    assert found.shape == want.shape and np.array_equal(found, want)


def test_the_description_counts_heads_that_fade() -> None:
    shape = small_model("nemotron-dense").checkpoint.geometry.ssm
    assert shape.kind is SsmKind.MAMBA2
    decays = np.full((70, 1, 1, 4), np.log(0.5))
    decays[..., 2:] = -1e-9
    found = describe_decays(decays, shape)
    assert found["live_share"]["bfloat16"][8:11] == [1.0, 0.5, 0.5], "half of the heads are at 2^-9 after nine tokens"
    assert found["live_share"]["float32"][23:25] == [1.0, 0.5]
    assert found["mean_log_decay"][0] == pytest.approx([np.log(0.5)] * 2 + [-1e-9] * 2, rel=1e-4)
    (saved,) = [s for s in found["saved"] if s["output"] == "bfloat16" and s["window"] == 8]
    assert saved["saved"] == 0.0 and saved["bytes_per_token"] > 0


def test_a_head_that_forgets_at_once_reads_its_checkpoint_never() -> None:
    shape = small_model("nemotron-dense").checkpoint.geometry.ssm
    never, always = saving_by_decay(shape, 16, 2.0**-9, [0.9999, 1e-6])
    assert never == 0.0
    total = window_bytes_per_token(shape, ReplayConfig(window=16), 1, 1.0)
    assert always == pytest.approx(state_bytes(shape, StateFormat.FLOAT32) / total)
