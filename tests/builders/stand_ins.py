"""What stands for a tiny checkpoint whose original is not installed: a committed one of the same kind. No test here.

Same family, same kinds of layers, the names and packing of public files, bfloat16; narrower (64 wide, 8 experts) and
with random weights. It gets what the original has beside them: a tokenizer, the drafting head of the dense Qwen, and
experts whose columns are multiples of 32, so that each of two ranks has whole NVFP4 blocks and none stays in BF16.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.paths import EXAMPLES
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.models import model_of
from trtllm_replayssm.weights.config_reader import load_json
from trtllm_replayssm.weights.hf_config import parse_config

COMMITTED = {
    "nemotron-tiny": "nemotron-dense",
    "nemotron-moe-tiny": "nemotron-moe",
    "qwen3_5-tiny": "qwen-dense",
    "qwen3_5-moe-tiny": "qwen-moe",
}
EXPERT = re.compile(r"\.(?P<shared>shared_)?experts?\.(\d+\.)?(?P<projection>\w+_proj)")
WITH_HEAD = "qwen3_5-tiny"
# columns of a routed and of the shared expert; the committed ones have some that no NVFP4 block divides
WIDTHS = {
    "nemotron-moe-tiny": {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64},
    "qwen3_5-moe-tiny": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}


def make_stand_in(name: str, destination: Path) -> Path:
    """Write what stands for the original `name` into the new folder `destination`, which is returned."""
    source, family = CHECKPOINTS / COMMITTED[name], name.partition("-")[0]
    destination.mkdir(parents=True)
    for path in EXAMPLES.glob(f"{family}-tiny-nvfp4/tokenizer*.json"):
        shutil.copy(path, destination)
    config = load_json(source / "config.json")
    text = config.get("text_config", config)
    text.update(WIDTHS.get(name, {}))
    if name == WITH_HEAD:
        text["mtp_num_hidden_layers"] = 1
    (destination / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(fitting(load_file(source / "model.safetensors"), config), destination / "model.safetensors")
    return destination


def fitting(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`tensors` with experts of the widths that `config` names and the head that it asks for; new values are random."""
    geometry, random = parse_config(config), torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) / shape[-1] ** 0.5).bfloat16()

    made = dict(tensors)
    if geometry.moe is not None:
        for name, tensor in tensors.items():
            found = EXPERT.search(name)
            if found is None:
                continue
            width = geometry.moe.shared_intermediate if found["shared"] else geometry.moe.intermediate
            *stack, rows, columns = tensor.shape
            if found["projection"] == "down_proj":
                made[name] = drawn(*stack, rows, width)
            else:
                made[name] = drawn(*stack, 2 * width if found["projection"] == "gate_up_proj" else width, columns)
    head = [spec for spec in model_of(geometry).parameters(geometry) if spec.name.startswith("mtp.")]
    return made | {spec.name: drawn(*spec.shape) for spec in head}
