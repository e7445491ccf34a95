"""The traffic model: the paper's numbers, the exact count against arrays and walks, and memory per slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.spec.helpers import KINDS, Sequence, part, random_inputs, small_shape
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.shapes import AttentionShape, Family, LayerKind, ModelGeometry, SsmKind, SsmShape
from trtllm_replayssm.spec import traffic
from trtllm_replayssm.spec.traffic import StepBytes, step_bytes

MIB = 2**20
SUPER = SsmShape(
    kind=SsmKind.MAMBA2, heads=128, groups=8, head_dim=64, state_dim=128, conv_kernel=4, conv_bias=True
)
QWEN = SsmShape(kind=SsmKind.GDN, heads=64, groups=16, head_dim=128, state_dim=128, conv_kernel=4, conv_bias=False)
RECORD = 2 * 64 + 2 * 128 + 4  # bytes of a record of one head as the paper counts it
CONFIGS = [
    ReplayConfig(window=16, max_step_tokens=4),
    ReplayConfig(window=16, max_step_tokens=4, recurrence=StateFormat.FP8),
    ReplayConfig(window=16, max_step_tokens=4, recurrence=StateFormat.FLOAT16, read=StateFormat.NVFP4),
]


def test_the_papers_numbers() -> None:
    conventional, replayed = traffic.paper_window_bytes(16, 64, 128)
    assert round(replayed / conventional, 2) == 0.58
    state = 4 * 64 * 128
    assert round(state / RECORD) == 84
    assert round(traffic.paper_best_window(state, RECORD, 1, 1)) == 13
    assert round(traffic.paper_best_window(state, RECORD, 4, 3.5)) == 24


def test_eq_15_is_eq_13_for_plain_decoding_and_eq_16_its_minimum() -> None:
    state = 4.0 * 64 * 128
    for window in (2, 8, 16, 31):
        per_token = traffic.paper_window_bytes(window, 64, 128)[1] / window
        assert traffic.paper_bytes_per_token(window, state, RECORD, 1, 1) == pytest.approx(per_token, rel=1e-12)
    for tokens, accepted in ((1, 1.0), (4, 3.5), (4, 1.5)):
        best = traffic.paper_best_window(state, RECORD, tokens, accepted)
        at, below, above = (
            traffic.paper_bytes_per_token(w, state, RECORD, tokens, accepted) for w in (best, best * 0.99, best * 1.01)
        )
        assert at < below and at < above


def test_one_step_by_hand() -> None:
    """One head, P = 2, N = 4, float32 state of 32 bytes; a Mamba-2 record is 4 + 8 + 4 bytes in bfloat16."""
    shape = small_shape(SsmKind.MAMBA2, heads=1, groups=1, head_dim=2, state_dim=4)
    config = ReplayConfig(window=4, max_step_tokens=2)
    io = 2 * 2 * (2 + 4 + 4 + 1 + 2)  # x, k, q, dt, o of two tokens
    assert step_bytes(shape, config, 2, 2, 2) == StepBytes(state_read=32, ring_read=32, ring_write=32, io=io)
    assert step_bytes(shape, config, 3, 2, 2) == StepBytes(
        state_read=32, state_write=32, ring_read=48, ring_write=32, io=io
    )
    assert step_bytes(shape, config, 4, 0, 2) == StepBytes()
    assert step_bytes(shape, config, 2, 2, 2).total == 96
    assert traffic.conventional_step_bytes(shape, StateFormat.FLOAT32, 2, 2) == StepBytes(
        state_read=32, state_write=64, io=io
    )


def test_a_two_precision_gdn_step_by_hand() -> None:
    """H = 2, G = 1, P = 2, N = 16: FP16 512 / 4 = 128 bytes; NVFP4 32 + 4 + 8 = 44 with both kinds of scales."""
    shape = small_shape(SsmKind.GDN, heads=2, groups=1, head_dim=2, state_dim=16)
    config = ReplayConfig(window=4, recurrence=StateFormat.FLOAT16, read=StateFormat.NVFP4)
    record = traffic.record_bytes(shape, config, 2)
    assert (record.key, record.value, record.raw) == (32 + 4 + 8, 8, 8 + 8)
    quiet, flush = step_bytes(shape, config, 3, 1, 2), step_bytes(shape, config, 4, 1, 2)
    assert (quiet.state_read, quiet.state_write, quiet.ring_read, quiet.ring_write) == (44, 0, 3 * 52, 68)
    # a flush reads the raw inputs in place of the corrections
    assert (flush.state_read, flush.state_write, flush.ring_read, flush.ring_write) == (128, 172, 4 * 60, 68)
    single = replace(config, recurrence=StateFormat.FLOAT32, read=None)
    assert traffic.record_bytes(shape, single, 2).raw == 0
    assert step_bytes(shape, single, 4, 1, 2).ring_read == 4 * 52


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_record_is_counted_as_the_specification_stores_it(kind: SsmKind, config: ReplayConfig) -> None:
    """Fields of a real record, times the bytes that the contract gives each."""
    shape = small_shape(kind, state_dim=16)
    sequence = Sequence.new(shape, config)
    sequence.step(random_inputs(shape, 1))
    record = sequence.committed()[0]
    act = 2
    total = record.key.size * act
    if kind is SsmKind.MAMBA2:
        assert record.weight is not None
        total += record.value.size * act + record.weight.size * 4
    else:
        total += record.key_factor.size * 4 + record.log_decay.size * 4 + record.value.size * 2
        total += 0 if record.v is None else record.v.size * act
        total += 0 if record.beta is None else record.beta.size * 4
    assert traffic.record_bytes(shape, config, act).total == total


@pytest.mark.parametrize("shape", [SUPER, QWEN], ids=["super", "qwen"])
@pytest.mark.parametrize("config", CONFIGS)
def test_plain_decoding_has_a_closed_form(shape: SsmShape, config: ReplayConfig) -> None:
    """A cycle of L tokens: L - 1 quiet steps with 1..L-1 records, one flush with L, L appends."""
    window = config.window
    record = traffic.record_bytes(shape, config, 2)
    recurrence = traffic.state_bytes(shape, config.recurrence)
    read = recurrence if config.read is None else traffic.state_bytes(shape, config.read)
    cycle = (window - 1) * read + 2 * recurrence + (0 if config.read is None else read)
    cycle += window * (window - 1) // 2 * (record.key + record.value)
    cycle += window * (record.key + (record.raw or record.value)) + window * record.total
    assert traffic.window_bytes_per_token(shape, config, 1, 1.0) == cycle / window


@pytest.mark.parametrize("accepted", [1.0, 1.7, 2.5, 3.5, 4.0])
def test_the_mean_over_a_cycle_is_what_a_long_walk_moves(accepted: float) -> None:
    shape = small_shape(SsmKind.GDN, heads=2, groups=1, head_dim=2, state_dim=16)
    config = CONFIGS[2]
    sequence = Sequence.new(shape, config)
    inputs = random_inputs(shape, 4)
    moved, before = 0, 0.0
    for step in range(1200):
        moved += step_bytes(shape, config, sequence.cursors.h, 4, 2).total
        count = int(np.floor((step + 1) * accepted + 1e-9)) - int(np.floor(before + 1e-9))
        before = (step + 1) * accepted
        sequence.step(part(inputs, 0, 4), accepted=count)
    per_token = moved / sequence.cursors.position
    assert traffic.window_bytes_per_token(shape, config, 4, accepted) == pytest.approx(per_token, rel=0.01)


def test_the_best_window_is_the_least_of_all_and_grows_with_acceptance_and_shared_keys() -> None:
    config = ReplayConfig()
    plain = traffic.best_window(SUPER, config, 1, 1.0)
    costs = [traffic.window_bytes_per_token(SUPER, replace(config, window=w), 1, 1.0) for w in range(1, 65)]
    assert plain == 1 + int(np.argmin(costs))
    assert 13 < plain < 30  # beyond the paper's 13, which does not share keys
    assert traffic.best_window(SUPER, config, 4, 3.5) > plain
    alone = replace(SUPER, groups=SUPER.heads)
    assert abs(traffic.best_window(alone, config, 1, 1.0) - 13) <= 1
    assert abs(traffic.best_window(alone, config, 4, 3.5) - 24) <= 4  # flush cycles are shorter than L / a


def test_replay_moves_about_half_of_the_conventional_bytes() -> None:
    for shape in (SUPER, QWEN):
        plain = traffic.window_bytes_per_token(shape, ReplayConfig(), 1, 1.0)
        assert 0.5 < plain / traffic.conventional_step_bytes(shape, StateFormat.FLOAT32, 1, 2).total < 0.58
        spec = traffic.window_bytes_per_token(shape, ReplayConfig(max_step_tokens=4), 4, 3.0) * 3.0
        assert spec / traffic.conventional_step_bytes(shape, StateFormat.FLOAT32, 4, 2).total < 0.4


def geometry(shape: SsmShape, ssm_layers: int, attention_layers: int, mtp: bool) -> ModelGeometry:
    layers = (LayerKind.SSM,) * ssm_layers + (LayerKind.ATTENTION,) * attention_layers
    return ModelGeometry(
        family=Family.NEMOTRON_H, name="x", hidden=64, vocab=64, layers=layers, ssm=shape,
        attention=AttentionShape(heads=32, kv_heads=2, head_dim=128), mlp_intermediate=64, moe=None, norm_eps=1e-5,
        tie_embeddings=False, max_positions=4096, eos_ids=(2,), bos_id=None, pad_id=None,
        mtp_pattern=(LayerKind.ATTENTION,) if mtp else (),
    )  # fmt: skip


def test_memory_of_a_slot_of_the_large_mamba2_model() -> None:
    """40 layers of 4 MiB in float32 (paper, Appendix C.2); 8 attention layers of 1 KiB a token in bfloat16."""
    config = ReplayConfig(window=16, max_step_tokens=4)
    pool = PoolConfig(slots=8, max_seq_len=1024, activation=ActivationDtype.BFLOAT16)
    slot = traffic.slot_bytes(geometry(SUPER, 40, 8, mtp=False), config, pool)
    assert (slot.checkpoint, slot.read_copy, slot.snapshots) == (160 * MIB, 0, 0)
    assert slot.kv == 8 * 1024 * 1024
    assert slot.rings == 40 * 20 * (8192 * 2 + 1024 * 2 + 128 * 4)
    assert slot.conv_windows == 40 * 7 * 10240 * 2
    assert slot.cursors == 20
    parts = (slot.checkpoint, slot.kv, slot.rings, slot.conv_windows, slot.cursors)
    assert slot.total == sum(parts)
    with_head = traffic.slot_bytes(geometry(SUPER, 40, 8, mtp=True), config, pool)
    assert with_head.kv == 9 * 1024 * 1024
    low = replace(config, recurrence=StateFormat.FP8, read=StateFormat.NVFP4, recurrence_rounding=Rounding.NEAREST)
    lower = traffic.slot_bytes(geometry(SUPER, 40, 8, mtp=False), low, pool)
    assert lower.checkpoint == 40 * (MIB + 128 * 64 * 4)
    assert lower.read_copy == 40 * (MIB // 2 + 128 * 64 * 8 + 128 * 4)


def test_a_conventional_speculative_slot_holds_a_snapshot_for_each_token() -> None:
    pool = PoolConfig(slots=8, max_seq_len=1024, activation=ActivationDtype.BFLOAT16)
    model = geometry(QWEN, 3, 1, mtp=False)
    plain = traffic.conventional_slot_bytes(model, StateFormat.FLOAT32, 1, pool)
    four = traffic.conventional_slot_bytes(model, StateFormat.FLOAT32, 4, pool)
    assert (plain.checkpoint, plain.snapshots, plain.conv_windows) == (12 * MIB, 0, 3 * 3 * 12288 * 2)
    assert (four.checkpoint, four.snapshots, four.conv_windows) == (12 * MIB, 36 * MIB, 3 * 6 * 12288 * 2)
    replayed = traffic.slot_bytes(model, ReplayConfig(window=16, max_step_tokens=4), pool)
    assert replayed.total < 0.4 * four.total


@pytest.mark.parametrize(("h", "tokens"), [(-1, 1), (17, 1), (3, 5), (3, -1)])
def test_a_step_that_cannot_happen_is_refused(h: int, tokens: int) -> None:
    with pytest.raises(ContractError, match="step_bytes"):
        step_bytes(SUPER, CONFIGS[0], h, tokens, 2)


@pytest.mark.parametrize(("tokens", "accepted"), [(5, 1.0), (2, 2.5), (2, 0.5)])
def test_a_mean_acceptance_outside_the_step_is_refused(tokens: int, accepted: float) -> None:
    with pytest.raises(ContractError, match="mean_accepted"):
        traffic.window_bytes_per_token(SUPER, CONFIGS[0], tokens, accepted)
