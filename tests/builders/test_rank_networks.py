"""The networks of two ranks that share a model, walked in lockstep with torch, against the torch session of one rank.

Oracle O4: another implementation of whole models. Between engines the ranks' sums and joins are native operations; with
plugins they are collective layers of the one network. Each rank runs in a thread, with pools of its own; logits must be
the same on both, and its states those of its heads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, trace_networks
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, assert_close, drive, open_checkpoint, options
from tests.parallel.thread_ranks import ThreadRanks, on_all, thread_ranks
from tests.session.sessions import CPU, states
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.bindings import LOGITS, MOE, RANK_JOIN, RANK_SUM, ROUTE, OpStep
from trtllm_replayssm.builders.flavour import CURRENT, FlavourName
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.ops.layer_state import ReplayLayerState
from trtllm_replayssm.runtime.session.base import Logits, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.shard import CheckpointShard
from trtllm_replayssm.weights.tensor_parallel import partial_results

SEGMENTED = ("nemotron-dense", "nemotron-moe", "nemotron-moe-groups", "qwen-dense", "qwen-moe", "nemotron-moe-tiny")
IN_ONE = (*SEGMENTED, "qwen3_5-tiny")
POOL = PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
PAIRS = [(name, FlavourName.RTX) for name in SEGMENTED] + [(name, FlavourName.TENSORRT) for name in IN_ONE]


def of_rank(rank: int, flavour: FlavourName, replay: ReplayConfig = REPLAY) -> BuildOptions:
    target = CURRENT if flavour is FlavourName.TENSORRT else "12.0"
    return replace(options(replay=replay), flavour=flavour, target=target, tp_size=2, tp_rank=rank)


def rank_session(
    checkpoint: Checkpoint, flavour: FlavourName, ranks: ThreadRanks, directory: Path, replay: ReplayConfig = REPLAY
) -> TensorRtSession:
    wanted = of_rank(ranks.parallel.rank, flavour, replay)
    session = evaluated_session(trace_networks(CheckpointParameters(checkpoint), wanted), directory, ranks)
    # what `states` folds with: engines with plugins hold the vectors themselves
    session._weights = TorchWeights(CheckpointShard(checkpoint, ranks.parallel), torch.float32, CPU, ranks=ranks)
    return session


@pytest.mark.parametrize(("name", "flavour"), PAIRS, ids=[f"{n}-{f.value}" for n, f in PAIRS])
def test_two_ranks_compute_what_one_does(name: str, flavour: FlavourName, tmp_path: Path) -> None:
    both = thread_ranks(2)
    with open_checkpoint(name) as checkpoint:
        ours = [rank_session(checkpoint, flavour, ranks, tmp_path / f"{i}") for i, ranks in enumerate(both)]
        answers: list[list[Logits]] = on_all(lambda rank: [*drive(ours[rank])], 2)
        theirs = TorchSession.from_checkpoint(checkpoint, REPLAY, POOL)
        assert_close(answers[0], drive(theirs))
        for one, other in zip(*answers, strict=True):
            np.testing.assert_array_equal(one, other)
        for slot in (1, 2):
            assert {session.cursors(slot) for session in ours} == {theirs.cursors(slot)}
            parts = zip(*(states(session, slot) for session in ours), strict=True)
            for own, whole in zip(parts, states(theirs, slot), strict=True):
                difference = (torch.cat(own) - whole).abs().max()  # a rank's heads follow the other's
                assert float(difference) <= REPLAY_LOGIT_NOISE * float(whole.abs().max())
    sums = len([n for n in partial_results(theirs.geometry) if not n.startswith("mtp.")])
    passes = 3 + 12  # prompt chunks, and the steps of `drive`
    assert [ranks.calls for ranks in both] == [passes * (sums + 1)] * 2


@pytest.mark.parametrize("flavour", list(FlavourName))
@pytest.mark.parametrize("name", ["nemotron-dense", "qwen-dense"])
def test_two_ranks_round_their_states_as_one_does(name: str, flavour: FlavourName, tmp_path: Path) -> None:
    """Stochastic rounding draws by the model's head, whichever rank has it: the FP8 checkpoints hold the same codes."""
    both, replay = thread_ranks(2), ReplayConfig(window=8, max_step_tokens=4, recurrence=StateFormat.FP8)
    with open_checkpoint(name) as checkpoint:
        ours = [rank_session(checkpoint, flavour, ranks, tmp_path / f"{i}", replay) for i, ranks in enumerate(both)]
        on_all(lambda rank: [*drive(ours[rank])], 2)
        theirs = TorchSession.from_checkpoint(checkpoint, replay, POOL)
        for _ in drive(theirs):
            pass
    for slot in (1, 2):
        for layer in theirs.pools.ssm:
            parts = [codes(session, layer, slot) for session in ours]
            same = (torch.cat(parts) == codes(theirs, layer, slot)).float().mean()
            assert float(same) > 0.97, (layer, slot)  # sums in another order move a few to the next code


def codes(session: TorchSession, layer: int, slot: int) -> torch.Tensor:
    """The stored elements of a slot's checkpoint [H, P, N]."""
    state = session.pools.ssm[layer]
    assert isinstance(state, ReplayLayerState)
    return state.checkpoint.data[slot].view(torch.uint8)


@pytest.mark.parametrize("flavour", list(FlavourName))
def test_two_ranks_draft_what_one_does(flavour: FlavourName, tmp_path: Path) -> None:
    both, prompt = thread_ranks(2), list(range(40, 62))

    def drafts(session: TorchSession) -> list[Logits]:
        slot = session.allocate(1)
        (last,) = session.prefill([PrefillChunk(slot, prompt, True)])
        assert last is not None
        (first,) = session.mtp_begin([MtpRow(slot, [*prompt[1:], int(last.argmax())])])
        return [last, first, *(session.mtp_next([int(first.argmax())])[0] for _ in range(2))]

    with open_checkpoint("qwen3_5-tiny") as checkpoint:
        ours = [rank_session(checkpoint, flavour, ranks, tmp_path / f"{i}") for i, ranks in enumerate(both)]
        answers = on_all(lambda rank: drafts(ours[rank]), 2)
        expected = drafts(TorchSession.from_checkpoint(checkpoint, REPLAY, POOL))
    for answer in answers:
        np.testing.assert_allclose(answer, expected, atol=REPLAY_LOGIT_NOISE, rtol=0)


def test_sums_follow_a_mixer_and_a_feed_forward_part_and_the_join_ends_the_program() -> None:
    with open_checkpoint("qwen-moe") as checkpoint:
        traced = trace_networks(CheckpointParameters(checkpoint), of_rank(0, FlavourName.RTX))
        program, layers = traced.programs["main"], checkpoint.geometry.layers
    ops = [step for step in program.steps if isinstance(step, OpStep)]
    assert [step.op for step in ops].count(RANK_SUM) == 2 * len(layers)
    last = program.steps[-1]
    assert isinstance(last, OpStep) and last.op == RANK_JOIN and last.outputs["out"] == program.outputs[LOGITS]
    vocab = traced.geometry.vocab
    assert program.tensors[last.inputs["x"].tensor].dims == ("B", "K", vocab // 2)
    assert program.tensors[LOGITS].dims == ("B", "K", vocab)


@pytest.mark.parametrize("name", ["nemotron-moe-groups", "qwen-moe"])
def test_every_rank_routes_over_all_experts_and_counts_its_own_from_zero(name: str) -> None:
    """Ids reach the experts as the router gives them on the first rank, less the number of the first on others."""
    with open_checkpoint(name) as checkpoint:
        experts = checkpoint.experts(next(n for n in checkpoint.names() if n.endswith("experts.up_proj")))
        for rank, first in enumerate((0, len(experts) // 2)):
            traced = trace_networks(CheckpointParameters(checkpoint), of_rank(rank, FlavourName.TENSORRT))
            (calls,) = traced.calls.values()
            routes, sums = ([c for c in calls if c.plugin.name == op] for op in (ROUTE, MOE))
            assert len(routes) == len(sums) > 0
            for route, experts_of in zip(routes, sums, strict=True):
                assert route.plugin.fields["experts"] == len(experts)
                assert experts_of.plugin.fields["experts"] == len(experts) // 2
                assert (experts_of.names[1] == route.outputs[0]) == (first == 0)
                assert experts_of.names[2] == route.outputs[1]
            constants = next(iter(traced.segments.values())).network.constants
            assert [c.array.item() for c in constants.values() if c.dtype == "int32" and c.array.size == 1] == (
                [first] if first else []
            )


def test_ranks_record_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = thread_ranks(2)
    with open_checkpoint("qwen-dense") as checkpoint:
        ours = [rank_session(checkpoint, FlavourName.RTX, ranks, tmp_path / f"{i}") for i, ranks in enumerate(both)]
    networks = [session._model.network for session in ours]
    assert on_all(lambda rank: networks[rank].obstacle(), 2) == [None, None]
    monkeypatch.setattr(ours[1]._engines, "obstacle", lambda: "an engine allocates")
    answers = on_all(lambda rank: networks[rank].obstacle(), 2)
    assert answers == ["another rank cannot record its engines", "an engine allocates"]


def test_engines_of_another_rank_are_refused(tmp_path: Path) -> None:
    one, other = thread_ranks(2)
    with open_checkpoint("qwen-dense") as checkpoint:
        traced = trace_networks(CheckpointParameters(checkpoint), of_rank(0, FlavourName.RTX))
        evaluated_session(traced, tmp_path / "own", one)
        for ranks, named in ((other, "rank 1 of 2"), (None, "rank 0 of 1")):
            with pytest.raises(EngineMismatchError, match=f"expected {named}, got engines of rank 0 of 2"):
                evaluated_session(traced, tmp_path / "wrong", ranks)
