"""Which checkpoint it is: one short text that copies share and that other weights of the same geometry do not have.

Bundles of ranks that are built one by one carry it, so that ranks of two checkpoints are not run together.
"""

from __future__ import annotations

import hashlib
import json
import re

from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.config_reader import load_json

PIECE = 4096  # bytes of a tensor that are read: one page
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """`sha256:` and the digest of config.json as values, every tensor's name, type and shape, and the middle bytes of
    all tensors but routed experts beyond a block's first.

    Neither files' names, times and order nor the tensors' distribution over them count. A few thousand pages are read
    of the largest models; training changes all tensors, so that it need not read more. HAZARD: no seal; a change made
    on purpose elsewhere in a tensor is not seen.
    """
    config = load_json(checkpoint.directory / "config.json")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for tensor in checkpoint.stored_tensors():
        digest.update(f"\n{tensor.name} {tensor.dtype} {list(tensor.shape)} ".encode())
        expert = _EXPERT.search(tensor.name)
        if expert is None or int(expert[1]) == 0:
            digest.update(tensor.middle(PIECE))
    return f"sha256:{digest.hexdigest()}"
