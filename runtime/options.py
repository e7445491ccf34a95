"""Settings of `LLM`: names after TensorRT-LLM's, and only those that act. Frozen, checked when made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trtllm_replayssm.checks import require_positive, require_type
from trtllm_replayssm.config import MAX_STEP_TOKENS, CudaGraphConfig, ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.prefix.settings import DEFAULT_BLOCK

_LOG = logging.getLogger(__name__)
AUTO = "auto"
MAX_DRAFTS = MAX_STEP_TOKENS - 1  # a step holds the base token and its drafts
STATE_DTYPES = {AUTO: None, "float32": StateFormat.FLOAT32, "float16": StateFormat.FLOAT16, "fp8": StateFormat.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """Memory of sequences.

    max_tokens: positions over all sequences; every slot holds max_seq_len of them. free_gpu_memory_fraction: share of
    the memory free at start that slots may take (host memory on a CPU). mamba_ssm_cache_dtype: format of the
    recurrent checkpoint, "auto": as the checkpoint's configuration says; mamba_ssm_stochastic_rounding: how it is
    rounded. enable_block_reuse: prompts begin at snapshots of earlier prompts that began alike; tokens_per_block:
    tokens between places where a snapshot may be taken; host_cache_size: bytes of host memory for snapshots, None: a
    quarter of what is free at start. reuse_outputs: keep the state at the end of answers too, for a next turn.
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    mamba_ssm_cache_dtype: str = AUTO
    mamba_ssm_stochastic_rounding: bool = True
    enable_block_reuse: bool = False
    tokens_per_block: int = DEFAULT_BLOCK
    host_cache_size: int | None = None
    reuse_outputs: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "tokens_per_block", "host_cache_size"):
            if getattr(self, name) is not None:
                require_positive("KvCacheConfig", name, getattr(self, name))
        for name in ("mamba_ssm_stochastic_rounding", "enable_block_reuse", "reuse_outputs"):
            require_type("KvCacheConfig", name, getattr(self, name), bool)
        require_type("KvCacheConfig", "mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, str)
        if not 0 < self.free_gpu_memory_fraction <= 1:
            raise ConfigError(
                "KvCacheConfig", "free_gpu_memory_fraction", expected="in (0, 1]", got=self.free_gpu_memory_fraction
            )
        if self.mamba_ssm_cache_dtype not in STATE_DTYPES:
            raise ConfigError(
                "KvCacheConfig", "mamba_ssm_cache_dtype", expected=sorted(STATE_DTYPES), got=self.mamba_ssm_cache_dtype
            )
        if self.reuse_outputs and not self.enable_block_reuse:
            raise ConfigError("KvCacheConfig", "reuse_outputs", expected="False without enable_block_reuse", got=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPDecodingConfig:
    """Drafts from the model's own head. num_nextn_predict_layers and max_draft_len both mean drafts per step.

    sample_drafts: draw drafts of sampled requests from the head's distribution instead of taking its argmax.
    """

    num_nextn_predict_layers: int | None = None
    max_draft_len: int | None = None
    sample_drafts: bool = False

    def __post_init__(self) -> None:
        require_type("MTPDecodingConfig", "sample_drafts", self.sample_drafts, bool)
        layers, drafts = self.num_nextn_predict_layers, self.max_draft_len
        for name, value in (("num_nextn_predict_layers", layers), ("max_draft_len", drafts)):
            if value is not None:
                require_positive("MTPDecodingConfig", name, value, most=MAX_DRAFTS)
        if layers is not None and drafts is not None and layers != drafts:
            raise ConfigError(
                "MTPDecodingConfig", "max_draft_len", expected=f"{layers} (num_nextn_predict_layers)", got=drafts,
                hint="Both mean drafts per step: give one of them",
            )  # fmt: skip

    @property
    def draft_len(self) -> int:
        """Drafts per step."""
        return self.max_draft_len or self.num_nextn_predict_layers or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramDecodingConfig:
    """Drafts from the request's own text: the continuation of the longest earlier match of its last tokens."""

    max_draft_len: int
    max_matching_ngram_size: int = 4

    def __post_init__(self) -> None:
        require_positive("NGramDecodingConfig", "max_draft_len", self.max_draft_len, most=MAX_DRAFTS)
        require_positive("NGramDecodingConfig", "max_matching_ngram_size", self.max_matching_ngram_size)

    @property
    def draft_len(self) -> int:
        """Drafts per step."""
        return self.max_draft_len


SpeculativeConfig = MTPDecodingConfig | NGramDecodingConfig
_Config = TypeVar("_Config", KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig, CudaGraphConfig)


def config_from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """A settings object from a file's keys. Raises ConfigError for a key that does not act here."""
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(kind.__name__, ", ".join(unknown), expected=f"keys among {known}", got="an unsupported key")
    return kind(**values)


def resolve_replay(replay: ReplayConfig | None, cache: KvCacheConfig, draft_len: int, state_dtype: str) -> ReplayConfig:
    """The replay settings to run with: given or from the cache settings, with max_step_tokens = 1 + draft_len.

    state_dtype: what the checkpoint's configuration asks for. Raises ConfigError when 1 + draft_len > window, or when
    both settings name a format.
    """
    given = replay is not None
    if replay is None:
        replay = ReplayConfig(
            recurrence=_recurrence(cache.mamba_ssm_cache_dtype, state_dtype),
            recurrence_rounding=Rounding.STOCHASTIC if cache.mamba_ssm_stochastic_rounding else Rounding.NEAREST,
        )
    elif cache.mamba_ssm_cache_dtype != AUTO:
        raise ConfigError(
            "LLM",
            "mamba_ssm_cache_dtype",
            expected=f"{AUTO!r} when replay_config sets the format ({replay.recurrence.value})",
            got=cache.mamba_ssm_cache_dtype,
        )
    if replay.recurrence is not StateFormat.FLOAT32 and replay.recurrence_rounding is Rounding.NEAREST:
        _LOG.warning(
            "recurrent state: %s rounded to nearest is biased and drifts with length (window %d: at every flush); "
            "stochastic rounding does not", replay.recurrence.value, replay.window,
        )  # fmt: skip
    _LOG.info("recurrent state: %s", _origin(replay, given, cache.mamba_ssm_cache_dtype, state_dtype))
    return replace(replay, max_step_tokens=1 + draft_len)


def _origin(replay: ReplayConfig, given: bool, asked: str, state_dtype: str) -> str:
    """What the state is kept as and who said so. The window is named where it is settled: a tune file may set another
    one where no replay settings are given.
    """
    says = f"the checkpoint's configuration says {state_dtype}"
    if given:
        reads = "" if replay.read is None else f", read in {replay.read.value}"
        chosen = f"{replay.recurrence.value}{reads}, window {replay.window}"
        return f"{chosen}, by the settings given or their defaults; {says}"
    if asked != AUTO:
        return f"{asked}, as mamba_ssm_cache_dtype asks; {says}"
    own = replay.recurrence.value == state_dtype
    return f"{replay.recurrence.value}, " + ("as the checkpoint's configuration says" if own else f"where {says}")


def _recurrence(asked: str, state_dtype: str) -> StateFormat:
    explicit = STATE_DTYPES[asked]
    if explicit is not None:
        return explicit
    found = STATE_DTYPES.get(state_dtype)
    if found is None:
        _LOG.warning("recurrent state: the checkpoint asks for %s, which is not built; float32 is used", state_dtype)
        return StateFormat.FLOAT32
    return found
