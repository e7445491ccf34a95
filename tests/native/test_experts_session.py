"""Sessions of models with routed experts on CUDA: as close to the CPU session in float32 as the reference operations on
CUDA in bfloat16 are.

The kernels round at other places than the reference operations, so float32 is the truth for both. Small random
checkpoints of sizes that every kernel serves. A router that is close to a tie amplifies the last bit of a bfloat16
product in single steps, on any device, so the judge is the median step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native import harness
from tests.native.test_session import forced, open_session
from tests.weights.small_models import BF16, NEMOTRON, QWEN_MOE, random_tensors, write
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.session import torch_session

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

VOCAB, WIDTHS, STEPS_TOKENS = 512, (4, 3, 1, 2), 48
COMMON = {
    "hidden_size": 256, "vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron": {
        **NEMOTRON, **COMMON, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "mamba_num_heads": 8,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_routed_experts": 16, "moe_latent_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
    "qwen": {
        **QWEN_MOE, **COMMON, "num_hidden_layers": 3, "mtp_num_hidden_layers": 0, "num_experts": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "shared_expert_intermediate_size": 128,
    },
}  # fmt: skip


def checkpoint(directory: Path, name: str) -> Path:
    """Matrices of the size that keeps activations as they are; vectors near 0, as `random_tensors` makes them."""
    tensors = random_tensors(CONFIGS[name])
    for key, values in tensors.items():
        if key.endswith("correction_bias"):
            tensors[key] = values * 0.1
        elif values.ndim == 2:
            tensors[key] = (values.astype(np.float32) / math.sqrt(values.shape[1])).astype(BF16)
        else:
            tensors[key] = (values.astype(np.float32) * 0.2 + (1.0 if "norm" in key else 0.0)).astype(BF16)
    return write(directory, CONFIGS[name], tensors)


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_stay_as_close_to_float32_as_the_reference_on_cuda(
    name: str, conventional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / name, name)
    tokens = np.random.default_rng(7).integers(4, VOCAB, STEPS_TOKENS).tolist()
    prompt = np.random.default_rng(8).integers(4, VOCAB, 12).tolist()
    monkeypatch.setattr("tests.native.test_session.PROMPT", prompt)

    def run(device: str, activation: ActivationDtype) -> Any:
        session = open_session(path, device, max(WIDTHS), activation, conventional=conventional, debug=False)
        return session, forced(session, tokens, WIDTHS)

    _, expected = run("cpu", ActivationDtype.FLOAT32)
    native, got = run("cuda", ActivationDtype.BFLOAT16)
    assert native.recorded.sizes and native.graphs.count > 0, "its experts wait for nothing"
    monkeypatch.setattr(torch_session, "native_ops", lambda pools: None)
    _, reference = run("cuda", ActivationDtype.BFLOAT16)
    assert np.isfinite(got).all() and np.abs(expected).max() > 1.0
    noise, error = (np.abs(logits - expected).mean(-1) for logits in (reference, got))
    # Other rounding points of the same number of bfloat16 values (1.2); a wrong one or a wrong expert is off by more.
    assert np.median(error) <= 1.2 * np.median(noise), (np.median(error), np.median(noise))
