"""On a GPU: stored states have the specification's bytes, and recorded forced decoding gives what the session gives."""

from __future__ import annotations

import pytest
import torch

from tests.evaluation.small import PROMPT, random_streams
from tests.layer_shapes import ssm_shape
from tests.ops.layers import as_bytes
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat
from trtllm_replayssm.ops.reference.philox import state_words
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.weights.checkpoint import Checkpoint

NAMES = ["shared-fp32-L4", "shared-nvfp4-sr-L4", "shared-fp8-rtn-L4", "separate-nvfp4-fp16-sr-L4"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("fmt", [f for f in StateFormat if f is not StateFormat.FLOAT32])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_the_device_stores_the_bytes_of_the_cpu(fmt: StateFormat, rounding: Rounding) -> None:
    """The CPU's are held against the specification bit for bit in tests/ops."""
    shape, g = ssm_shape(SsmKind.MAMBA2, heads=4, groups=1, head_dim=24, state_dim=160), torch.Generator()
    g.manual_seed(0)
    states = torch.randn((3, 4, 24, 160), generator=g) * 10.0 ** torch.randint(-6, 6, (3, 4, 24, 160), generator=g)
    states[0, 0], states[1, 1, 2, 3] = 0.0, float("inf")
    stored = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        seed, position = (torch.tensor(values, device=device) for values in ([-5, 7, 1 << 62], [0, 9, 2**31 - 1]))
        store = StateStore.allocate(fmt, shape, 5, device)
        store.store([4, 0, 2], states.to(device), rounding, state_words(seed, 300, 4, 24 * 160, position))
        stored.append(store)
    for ours, theirs in zip(stored[1].tensors(), stored[0].tensors(), strict=True):
        assert torch.equal(as_bytes(ours.cpu()), as_bytes(theirs))
    slots = torch.arange(5)
    assert torch.equal(stored[1].load(slots.cuda()).cpu(), stored[0].load(slots))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_name", ["nemotron-dense", "qwen-dense", "nemotron-moe"])
def test_recorded_steps_give_what_the_session_gives(model_name: str, name: str) -> None:
    """The reference operations through eight flushes, recorded with nothing read back; with experts, as they are."""
    checkpoint = Checkpoint.open(CHECKPOINTS / model_name)
    model = Model.load(checkpoint, device="cuda", activation=ActivationDtype.FLOAT32)
    streams, replay = random_streams(model, 2, PROMPT + 40), parse_configuration(name, 3).replay
    run = ForcedDecoding(model, replay, streams, PROMPT)
    judge = model.session(replay, conventional=False, slots=2, max_seq_len=PROMPT + 40)
    slots = [judge.allocate(s.seed) for s in streams]
    judge.prefill([PrefillChunk(x, s.ids[:PROMPT], True) for x, s in zip(slots, streams, strict=True)])
    while run.position < PROMPT + 36:
        start = run.position
        logits = run.step(3)
        rows = [DecodeRow(x, s.ids[start : run.position]) for x, s in zip(slots, streams, strict=True)]
        want = judge.decode(rows)
        judge.commit([run.position - start] * 2)
        for ours, theirs in zip(logits.cpu(), want, strict=True):
            torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-5)
    assert run.session.graphs.count >= 2 or checkpoint.geometry.moe is not None
    assert [run.session.cursors(s) for s in run.slots] == [judge.cursors(s) for s in slots]
    run.session.moved(run.slots)
    assert [run.session.pools.slot_hash(s) for s in run.slots] == [judge.pools.slot_hash(s) for s in slots]
