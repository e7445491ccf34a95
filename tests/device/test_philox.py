"""The device's random numbers are the specification's, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from trtllm_replayssm.runtime.device.philox import signed64, uniform
from trtllm_replayssm.spec import philox

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
POSITIONS = [0, 1, 4095, 2**31 - 1, 2**32 - 1]


def test_every_seed_position_and_domain_gives_the_specified_number() -> None:
    rng = np.random.default_rng(0)
    seeds = [*SEEDS, *(int(s) for s in rng.integers(0, 2**64, 40, dtype=np.uint64))]
    positions = [*POSITIONS, *(int(p) for p in rng.integers(0, 2**31, 40))]
    for domain in philox.Domain:
        got = uniform(torch.tensor([signed64(s) for s in seeds])[:, None], torch.tensor(positions)[None, :], domain)
        want = [[philox.uniform(seed, position, domain) for position in positions] for seed in seeds]
        assert got.dtype is torch.float64 and got.tolist() == want
