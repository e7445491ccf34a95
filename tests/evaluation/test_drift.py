"""The theory of rounding errors in a recurrence against a simulated recurrence, and set beside measurements."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation.drift import bias_growth, compare, deviation_growth

WINDOW = 4
LOG_DECAY = np.log(np.array([0.5, 0.9, 0.99, 0.999, 1.0]))


def simulated(errors: np.ndarray, writes: int) -> np.ndarray:
    """Deviation [trials, heads] after `writes` roundings that add `errors` and decay by alpha^L in between."""
    deviation = np.zeros(errors.shape[1:])
    for n in range(writes):
        deviation = np.exp(LOG_DECAY * WINDOW) * deviation + errors[n]
    return deviation


@pytest.mark.parametrize("writes", [1, 7, 300])
def test_the_theory_is_the_mean_and_the_deviation_of_a_simulated_recurrence(writes: int) -> None:
    trials = 4000
    noise = np.random.default_rng(0).normal(size=(writes, trials, len(LOG_DECAY)))
    spread = simulated(noise, writes).std(axis=0)
    # the standard error of a deviation from 4000 trials is 1.1 %; five of them
    assert np.allclose(spread, deviation_growth(LOG_DECAY, WINDOW, writes), rtol=0.056)
    bias = simulated(np.ones((writes, 1, len(LOG_DECAY))), writes)[0]
    assert np.allclose(bias, bias_growth(LOG_DECAY, WINDOW, writes), rtol=1e-6)


def test_the_limits_are_the_papers() -> None:
    alpha = np.exp(LOG_DECAY[:4])
    assert np.allclose(bias_growth(LOG_DECAY[:4], WINDOW, 10**6), 1 / (1 - alpha**WINDOW))
    assert np.allclose(deviation_growth(LOG_DECAY[:4], WINDOW, 10**6) ** 2, 1 / (1 - alpha ** (2 * WINDOW)))


def test_a_measurement_made_by_the_theory_agrees_with_it_and_one_turned_round_does_not() -> None:
    # after 102 tokens: the prompt's write and 25 flushes, before tokens 5, 9, ..., 101; then two records
    theory = 0.01 * deviation_growth(LOG_DECAY, WINDOW, 26) * np.exp(2 * LOG_DECAY)
    row = {
        "formats": "shared-fp8-sr", "configuration": "shared-fp8-sr-L4", "length": 102, "window": WINDOW,
        "state_error": [theory.tolist()],
    }  # fmt: skip
    found = compare(row, [LOG_DECAY.tolist()])
    assert (found["factor"], found["rank_correlation"], found["typical_ratio"]) == (pytest.approx(0.01), 1.0, 1.0)
    row["state_error"] = [theory[::-1].tolist()]
    assert compare(row, [LOG_DECAY.tolist()])["rank_correlation"] == pytest.approx(-1.0)
    row["state_error"] = [[*theory[:4].tolist(), 1e-9], (100 * theory).tolist()]
    found = compare(row, [LOG_DECAY.tolist()] * 2)
    assert (found["typical_ratio"], found["factor"]) == (1.0, pytest.approx(0.01)), "fitted on the first layer"
    assert found["typical_ratio_all"] > 1.0
    assert found["first_layer_above_noise"] == 4, "float32's own error says nothing"
    row["state_error"] = [[*theory[:3].tolist(), 1e-9, 1e-9]]
    assert compare(row, [LOG_DECAY.tolist()])["typical_ratio"] is None, "three heads are no curve"


def test_what_a_float32_checkpoint_has_as_well_does_not_count() -> None:
    """The last head has forgotten its rounding; what is left of it is that of the activations."""
    fast = np.append(LOG_DECAY, -8.0)
    theory = 0.01 * deviation_growth(fast, WINDOW, 26) * np.exp(2 * fast)
    row = {
        "formats": "shared-fp8-sr", "configuration": "shared-fp8-sr-L4", "length": 102, "window": WINDOW,
        "state_error": [[*theory[:5].tolist(), 2e-4]],
    }  # fmt: skip
    alone, beside = (compare(row, [fast.tolist()], floor) for floor in (None, [[1e-6] * 5 + [1.9e-4]]))
    assert (alone["first_layer_above_noise"], beside["first_layer_above_noise"]) == (6, 5)
    assert beside["factor"] == pytest.approx(0.01) and beside["typical_ratio_all"] == 1.0
    row["state_error"] = [[1e-3, *theory[1:5].tolist(), 2e-4]]
    assert compare(row, [fast.tolist()], [[1e-6] * 6])["first_layer_above_noise"] == 6, "above the floor it counts"


def test_what_has_no_theory_is_refused() -> None:
    row = {"formats": "separate-nvfp4-fp32", "configuration": "", "length": 1, "window": 1, "state_error": [[1.0]]}
    with pytest.raises(ConfigError, match="shared low-precision"):
        compare(row, [[0.0]])
