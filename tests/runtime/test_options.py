"""Settings of LLM: what is accepted, what is refused and with which words, and what follows from what."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.runtime.fake_session import FakeSession, geometry, hash_model
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.capacity import free_host_bytes, prefix_budget, require_slots
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.options import (
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    config_from_mapping,
    resolve_replay,
)
from trtllm_replayssm.runtime.replica import ReplicaOptions, make_drafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter


@pytest.mark.parametrize(
    "kind, values, words",
    [
        (KvCacheConfig, {"max_tokens": 0}, "max_tokens"),
        (KvCacheConfig, {"free_gpu_memory_fraction": 0.0}, "free_gpu_memory_fraction"),
        (KvCacheConfig, {"free_gpu_memory_fraction": 1.5}, "free_gpu_memory_fraction"),
        (KvCacheConfig, {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype: expected .*float16"),
        (KvCacheConfig, {"tokens_per_block": 0}, "tokens_per_block"),
        (KvCacheConfig, {"host_cache_size": 0}, "host_cache_size"),
        (KvCacheConfig, {"reuse_outputs": True}, "reuse_outputs: expected False without enable_block_reuse"),
        (KvCacheConfig, {"sink_token_length": 1, "dtype": "fp8"}, "dtype, sink_token_length: expected keys among"),
        (MTPDecodingConfig, {"max_draft_len": 0}, "max_draft_len"),
        (MTPDecodingConfig, {"max_draft_len": 3, "num_nextn_predict_layers": 2}, r"expected 2 \(num_nextn_pred.*got 3"),
        (MTPDecodingConfig, {"use_relaxed_acceptance_for_thinking": True}, "use_relaxed_acceptance_for_thinking"),
        (NGramDecodingConfig, {"max_draft_len": 2, "max_matching_ngram_size": 0}, "max_matching_ngram_size"),
        (NGramDecodingConfig, {"max_draft_len": 2, "is_use_oldest": True}, "is_use_oldest"),
    ],
)
def test_a_setting_that_is_wrong_or_does_not_act_is_refused_by_name(
    kind: type[KvCacheConfig], values: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_mapping(kind, values)


def test_a_prefix_budget_that_holds_no_snapshot_is_refused_with_both_numbers() -> None:
    assert prefix_budget(1000, 1000) == 1000
    assert prefix_budget(None, 1) > 1
    with pytest.raises(ConfigError, match=r"host_cache_size: expected at least 1000 bytes .*, got 999"):
        prefix_budget(999, 1000)


def test_both_names_of_the_draft_length_mean_the_same() -> None:
    assert MTPDecodingConfig().draft_len == 1
    assert MTPDecodingConfig(max_draft_len=3).draft_len == MTPDecodingConfig(num_nextn_predict_layers=3).draft_len == 3
    assert MTPDecodingConfig(max_draft_len=3, num_nextn_predict_layers=3).draft_len == 3
    assert NGramDecodingConfig(max_draft_len=5).draft_len == 5


def test_step_tokens_follow_from_the_draft_length() -> None:
    replay = resolve_replay(ReplayConfig(window=8, max_step_tokens=2), KvCacheConfig(), 5, "float32")
    assert (replay.window, replay.max_step_tokens) == (8, 6)
    assert resolve_replay(None, KvCacheConfig(), 0, "float32") == ReplayConfig()


def test_a05_more_step_tokens_than_the_window_are_refused_with_the_inequality() -> None:
    with pytest.raises(ConfigError, match=r"T_max <= L.*T_max = 5 > L = 4"):
        resolve_replay(ReplayConfig(window=4), KvCacheConfig(), 4, "float32")


@pytest.mark.parametrize(
    "asked, checkpoint, said",
    [
        ("auto", "float32", "float32, as the checkpoint's configuration says"),
        ("auto", "float16", "float16, as the checkpoint's configuration says"),
        ("auto", "bfloat16", "float32, where the checkpoint's configuration says bfloat16"),
        ("float32", "float16", "float32, as mamba_ssm_cache_dtype asks; the checkpoint's configuration says float16"),
        ("fp8", "fp8", "fp8, as mamba_ssm_cache_dtype asks; the checkpoint's configuration says fp8"),
    ],
)
def test_d01_the_state_format_is_the_one_asked_for_and_the_choice_is_logged(
    asked: str, checkpoint: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        replay = resolve_replay(None, KvCacheConfig(mamba_ssm_cache_dtype=asked), 0, checkpoint)
    assert replay.recurrence is StateFormat(said.partition(",")[0])
    assert replay.recurrence_rounding is Rounding.STOCHASTIC
    assert caplog.messages[-1] == f"recurrent state: {said}"


@pytest.mark.parametrize("checkpoint", ["float16", "float32"])
def test_what_the_settings_chose_is_not_said_to_be_the_checkpoints(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        asked = ReplayConfig(window=8, recurrence=StateFormat.FLOAT16, read=StateFormat.NVFP4)
        assert resolve_replay(asked, KvCacheConfig(), 0, checkpoint).recurrence is StateFormat.FLOAT16
    chosen = "float16, read in nvfp4, window 8, by the settings given or their defaults"
    assert caplog.messages[-1] == f"recurrent state: {chosen}; the checkpoint's configuration says {checkpoint}"


def test_rounding_of_the_state_is_a_setting() -> None:
    cache = KvCacheConfig(mamba_ssm_cache_dtype="float16", mamba_ssm_stochastic_rounding=False)
    assert resolve_replay(None, cache, 0, "float32").recurrence_rounding is Rounding.NEAREST


def test_two_sources_of_the_state_format_are_refused() -> None:
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype"):
        resolve_replay(ReplayConfig(), KvCacheConfig(mamba_ssm_cache_dtype="float16"), 0, "float32")


def test_b18_more_slots_than_the_positions_hold_are_refused_with_both_numbers() -> None:
    require_slots(4, 100, None)
    require_slots(4, 100, 400)
    with pytest.raises(ConfigError, match=r"max_batch_size: expected at most 3 slots .*max_tokens=399.*, got 4"):
        require_slots(4, 100, 399)


def test_free_host_memory_is_a_plausible_number() -> None:
    free = free_host_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


def test_the_drafter_is_the_one_asked_for() -> None:
    session = FakeSession(hash_model(24))
    assert make_drafter(None, session) is None
    assert isinstance(make_drafter(NGramDecodingConfig(max_draft_len=2), session), NGramDrafter)
    drafter = make_drafter(MTPDecodingConfig(max_draft_len=2), session)
    assert isinstance(drafter, MtpDrafter) and drafter.max_draft_len == 2


def test_the_default_budget_holds_every_row_with_its_drafts() -> None:
    assert ReplicaOptions().engine_config().max_num_tokens == 2048
    wide = ReplicaOptions(max_batch_size=512, speculative=MTPDecodingConfig(max_draft_len=7))
    assert wide.engine_config().max_num_tokens == 512 * 8


def test_a_drafter_longer_than_the_pool_allows_is_refused() -> None:
    session = FakeSession(hash_model(24), geometry=geometry(), replay=ReplayConfig(window=8, max_step_tokens=3))
    with pytest.raises(ConfigError, match=r"1 \+ draft length <= max_step_tokens = 3, got 1 \+ 3 = 4"):
        Engine(session, NGramDrafter(3, 2), None, EngineConfig(max_batch_size=1, max_num_tokens=8))


def test_d02_rounding_a_recurrence_to_nearest_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    biased = ReplayConfig(window=1, recurrence=StateFormat.FP8, recurrence_rounding=Rounding.NEAREST)
    for replay, warned in ((biased, True), (replace(biased, recurrence_rounding=Rounding.STOCHASTIC), False)):
        caplog.clear()
        resolve_replay(replay, KvCacheConfig(), 0, "float32")
        assert ("biased" in caplog.text) is warned


@pytest.mark.parametrize("value", ["no", 1, [], None])
def test_a_switch_is_true_or_false_and_nothing_else(value: object) -> None:
    for kind, name in (
        (KvCacheConfig, "enable_block_reuse"),
        (KvCacheConfig, "reuse_outputs"),
        (KvCacheConfig, "mamba_ssm_stochastic_rounding"),
        (MTPDecodingConfig, "sample_drafts"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: expected bool"):
            kind(**{name: value})  # type: ignore[arg-type]
