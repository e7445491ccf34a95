"""Every tolerance of the tests of operations and sessions, with what it must accept and what it must reject."""

from __future__ import annotations

from trtllm_replayssm.bench.bounds import FACTOR as FACTOR
from trtllm_replayssm.bench.bounds import FLOAT32_STEP as FLOAT32_STEP

# Accepts a float16 result that is the nearest of its exact value; rejects its neighbour.
FLOAT16_STEP = 2.0**-10

# Largest error of a run of float32 recurrent steps relative to the largest value. Accepts the orders of summation of
# tens of tokens (3e-7 seen); rejects a record that is missing, doubled, or decayed once too often (1e-3 and more).
RECURRENCE_NOISE = 2e-6

# The same for GDN replay, whose corrections are stored in float16. Accepts half a float16 step per correction;
# rejects a correction from a state one token old (1e-2 and more).
CORRECTION_NOISE = 2.0**-10

# Logits of the small checkpoints (values up to 8), absolute; their states relative to the largest. Accepts float32 sums
# through four layers (1e-5 seen; 1e-4 where a router amplifies them); rejects a float16 product (1e-3 and more).
LOGIT_NOISE = 2e-4

# The same between two runs of GDN replay, at the worst step (the median keeps to LOGIT_NOISE). Accepts a few
# corrections that round to the other float16 neighbour (5e-4 seen); rejects corrections that are not rounded (1e-2).
REPLAY_LOGIT_NOISE = 2e-3

# GDN replay against a recurrence without float16 corrections: the median step and the worst one, which a router that
# is close to a tie amplifies (2e-3 and 0.14 seen). Rejects a record missing or decayed once too often (1 and more).
CORRECTION_LOGIT_NOISE = (5e-3, 0.25)
