"""The device's random numbers are the specification's, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from tests.device.requests import on_devices
from trtllm_replayssm.runtime.device.philox import signed64, uniform
from trtllm_replayssm.spec import philox

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
POSITIONS = [0, 1, 4095, 2**31 - 1, 2**32 - 1]


@on_devices
def test_every_seed_position_and_domain_gives_the_specified_number(device: str) -> None:
    rng = np.random.default_rng(0)
    seeds = [*SEEDS, *(int(s) for s in rng.integers(0, 2**64, 40, dtype=np.uint64))]
    positions = [*POSITIONS, *(int(p) for p in rng.integers(0, 2**31, 40))]
    for domain in philox.Domain:
        keys = torch.tensor([signed64(s) for s in seeds], device=device)
        got = uniform(keys[:, None], torch.tensor(positions, device=device)[None, :], domain)
        want = [[philox.uniform(seed, position, domain) for position in positions] for seed in seeds]
        assert got.dtype is torch.float64 and got.tolist() == want
