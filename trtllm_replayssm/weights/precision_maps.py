"""Which matrix of the public checkpoints has which format, for builds with random weights.

Nemotron-3-Super-120B-A12B-NVFP4 is mixed, matrix by matrix: every routed expert NVFP4, some Mamba, latent, output and
shared-expert projections FP8, one shared projection NVFP4, the rest BF16 (its hf_quant_config.json). Of
Qwen3.5-122B-A10B-NVFP4 only the routed experts are quantised. The two small models are BF16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trtllm_replayssm.weights.matrix import MatrixFormat

SUPER, QWEN_122B = "nemotron-3-super-120b-a12b-nvfp4", "qwen3.5-122b-a10b-nvfp4"

_MOE_LAYERS = frozenset(
    i for i, kind in enumerate(
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ) if kind == "E"
)  # fmt: skip
_SUPER_FP8: Mapping[str, frozenset[int]] = {
    "in_proj": frozenset(
        (0, 2, 4, 6, 9, 11, 13, 15, 18, 20, 27, 29, 31, 40, 49, 51, 53, 55, 57, 60, 62, 66, 68, 71, 73, 82, 84, 86)
    ),
    "out_proj": frozenset(
        (0, 2, 4, 9, 11, 13, 18, 38, 40, 42, 44, 49, 51, 53, 55, 57, 60, 62, 64, 66, 68, 71, 73, 75, 77, 80, 82, 84, 86)
    ),
    "shared_experts.up_proj": _MOE_LAYERS - {41},
    "shared_experts.down_proj": _MOE_LAYERS - {1, 8, 76},
    "fc1_latent_proj": frozenset((1, 3, 5)),
    "fc2_latent_proj": frozenset((3,)),
    "o_proj": frozenset((69, 78)),
}  # fmt: skip
_SUPER_NVFP4 = {("shared_experts.down_proj", 1)}
_LAYER = re.compile(r"^(?:backbone|model)\.layers\.(\d+)\.(?:mixer|mlp)\.(.+?)(?:\.weight)?$")


def published_format(preset: str, name: str, first_layer: int = 0) -> MatrixFormat:
    """The format of a matrix or a stack by canonical name; `first_layer` is added to its layer number."""
    found = _LAYER.match(name)
    if found is None or preset not in (SUPER, QWEN_122B):
        return MatrixFormat.BF16
    layer, module = int(found[1]) + first_layer, found[2]
    if module.startswith("experts."):
        return MatrixFormat.NVFP4
    if preset != SUPER:
        return MatrixFormat.BF16
    if (module, layer) in _SUPER_NVFP4:
        return MatrixFormat.NVFP4
    return MatrixFormat.FP8 if layer in _SUPER_FP8.get(module, ()) else MatrixFormat.BF16
