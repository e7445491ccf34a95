"""Networks with plugin layers, evaluated with torch and the reference operations, against the torch session.

One network per program, as flavour `tensorrt` builds them; plugin layers are computed from their fields and inputs,
read in the documented order. Two formats of the read copy and the chunks of a prompt go through the same layers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, trace_networks
from tests.builders.quantised import mixed_checkpoint
from tests.builders.test_evaluated_sessions import assert_close, drive
from tests.session.sessions import states
from tests.tolerance import CORRECTION_LOGIT_NOISE, LOGIT_NOISE, REPLAY_LOGIT_NOISE
from trtllm_replayssm.builders.flavour import FlavourName
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import DenseMatrix, Matrix, MatrixFormat

FLOAT32 = ActivationDtype.FLOAT32


class ExactDense(CheckpointParameters):
    """Experts as stored, dense matrices in float32: activations then stay unquantised, as in the torch session."""

    def format_of(self, name: str) -> MatrixFormat:
        experts = self._checkpoint.spec(name).role is ParamRole.EXPERTS
        return super().format_of(name) if experts else MatrixFormat.F32

    def matrix(self, name: str) -> Matrix:
        return DenseMatrix(self._checkpoint.matrix(name).dequantize())


@pytest.mark.parametrize("read", [None, StateFormat.NVFP4, StateFormat.FP8])
@pytest.mark.parametrize("name", ["nemotron-moe-tiny", "qwen3_5-tiny"])
def test_plugin_layers_get_what_they_need(name: str, read: StateFormat | None, tmp_path: Path) -> None:
    replay = ReplayConfig(window=8, max_step_tokens=4, read=read)
    options = BuildOptions(
        flavour=FlavourName.TENSORRT, replay=replay, activation=FLOAT32, max_batch=4, max_seq_len=160,
        context_tokens=64,
    )  # fmt: skip
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        ours = evaluated_session(trace_networks(ExactDense(checkpoint), options), tmp_path)
        theirs = TorchSession.from_checkpoint(
            checkpoint, replay, PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
        )
        # a sum in another order moves a few values of a low-precision copy to the next code
        noise = (LOGIT_NOISE, REPLAY_LOGIT_NOISE) if read is None else CORRECTION_LOGIT_NOISE
        assert_close(drive(ours), drive(theirs), noise)
        ours._weights = theirs._weights  # what `states` folds with: these engines hold the vectors themselves
        pairs = [(ours.cursors(s), theirs.cursors(s), states(ours, s), states(theirs, s)) for s in (1, 2)]
    for our_cursors, their_cursors, our_states, their_states in pairs:
        assert our_cursors == their_cursors
        for x, y in zip(our_states, their_states, strict=True):
            assert float((x - y).abs().max()) <= REPLAY_LOGIT_NOISE * float(y.abs().max())
