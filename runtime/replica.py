"""Builds one replica for `LLM`: checkpoint, sizes, memory check, session, drafter, engine. The composition root.

A bundle of TensorRT engines instead of a checkpoint: see `bundle`.

torch is imported when a session is made, not before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from trtllm_replayssm.bundle_parts import bundle_parts, read_parts
from trtllm_replayssm.checks import require_positive, require_type
from trtllm_replayssm.config import EVERY_BATCH, RANK_TIMEOUT, CudaGraphConfig, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.runtime.ahead import steps_ahead
from trtllm_replayssm.runtime.capacity import prefix_budget, require_slots
from trtllm_replayssm.runtime.checkpoint_session import checkpoint_session
from trtllm_replayssm.runtime.device_memory import MAX_PLANNED_BATCH, plan_replica, planned_batch, require_plan
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.options import (
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SpeculativeConfig,
    resolve_replay,
)
from trtllm_replayssm.runtime.planner import MemoryPlan, prompts_in_progress, step_tokens
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig
from trtllm_replayssm.runtime.prefix.sizes import prompt_snapshot_bytes
from trtllm_replayssm.runtime.sampling.params import MAX_SEED
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.speculative.drafter import Drafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.step import SessionHead
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_replayssm.runtime.tuning import with_tuned
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.sizes import checkpoint_bytes
from trtllm_replayssm.weights.tensor_parallel import TensorParallel, shard_geometry

DEFAULT_BATCH = 8
DEFAULT_SEQ_LEN = 4096  # cap of the default only: a slot's keys and values are reserved for all of it
MAX_RANK_TIMEOUT = 7 * 24 * 3600  # seconds, for a debugger
BACKENDS = ("torch",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Settings of one replica, as `LLM` takes them; see there."""

    dtype: str = "auto"
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    prefill_chunk: int | None = None
    speculative: SpeculativeConfig | None = None
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    replay: ReplayConfig | None = None
    state_cache: str = "replay"
    seed: int = 0
    device: str = "cpu"
    backend: str = "torch"
    plugin_library: str | Path | None = None
    kernel_cache: str | Path | None = None
    cuda_graphs: CudaGraphConfig | None = EVERY_BATCH
    debug: bool = False
    device_loop: bool | None = None
    tensor_parallel_size: int = 1
    rank_timeout: int = RANK_TIMEOUT

    def __post_init__(self) -> None:
        require_positive("LLM", "tensor_parallel_size", self.tensor_parallel_size)
        require_positive("LLM", "rank_timeout", self.rank_timeout, most=MAX_RANK_TIMEOUT)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "prefill_chunk"):
            if getattr(self, name) is not None:
                require_positive("LLM", name, getattr(self, name))
        none = type(None)
        require_type("LLM", "speculative_config", self.speculative, MTPDecodingConfig, NGramDecodingConfig, none)
        require_type("LLM", "kv_cache_config", self.kv_cache, KvCacheConfig)
        require_type("LLM", "cuda_graph_config", self.cuda_graphs, CudaGraphConfig, none)
        require_type("LLM", "replay_config", self.replay, ReplayConfig, none)
        require_type("LLM", "seed", self.seed, int)
        require_type("LLM", "device_loop", self.device_loop, bool, none)
        if not 0 <= self.seed < MAX_SEED:
            raise ConfigError("LLM", "seed", expected="0..2^64-1", got=self.seed)

    @property
    def draft_len(self) -> int:
        """Drafts per step."""
        return 0 if self.speculative is None else self.speculative.draft_len

    @property
    def batch(self) -> int:
        """Sequences that run at once, and slots, unless the memory plan of a GPU settles the number."""
        return DEFAULT_BATCH if self.max_batch_size is None else self.max_batch_size

    def step_tokens(self, batch: int) -> int:
        """Tokens of one engine step; the default holds every row with its drafts."""
        return step_tokens(batch, self.draft_len) if self.max_num_tokens is None else self.max_num_tokens

    def engine_config(self, prefix: PrefixConfig | None = None) -> EngineConfig:
        """Batch, token budget and chunk."""
        return EngineConfig(
            max_batch_size=self.batch,
            max_num_tokens=self.step_tokens(self.batch),
            prefill_chunk=self.prefill_chunk,
            seed=self.seed,
            conventional_state=self.state_cache == "conventional",
            prefix=prefix,
            debug=self.debug,
        )


def build_engine(model: str | Path, tokenizer: object, options: ReplicaOptions) -> Engine:
    """An engine over a torch session of the checkpoint in `model`, or over the TensorRT engines of the bundle there.

    Raises ConfigError, CheckpointError, EngineMismatchError.
    """
    if options.backend not in BACKENDS:
        raise UnsupportedError("LLM", "backend", expected=f"one of {BACKENDS}", got=options.backend)
    if options.device.startswith("cuda"):
        from trtllm_replayssm.runtime.session.device import require_first_gpu

        require_first_gpu()
    if bundle_parts(Path(model)):
        from trtllm_replayssm.runtime.bundle import bundle_session, fitted

        folders, manifests = zip(*read_parts(Path(model)), strict=True)
        options = fitted(options, manifests[0])
        return engine_over(bundle_session(folders, manifests[0], options), folders[0], tokenizer, options)
    for name in ("plugin_library", "kernel_cache"):
        if getattr(options, name) is not None:
            raise ConfigError("LLM", name, expected="none: a checkpoint has no engines", got="one")
    checkpoint = Checkpoint.open(Path(model))
    geometry = checkpoint.geometry
    replay = resolve_replay(options.replay, options.kv_cache, options.draft_len, geometry.state_dtype)
    automatic = options.max_batch_size is None and options.device != "cpu"
    if options.replay is None:
        batch = MAX_PLANNED_BATCH if automatic else options.batch
        replay = with_tuned(replay, geometry.ssm, _device_name(options.device), batch)
        if options.tensor_parallel_size > 1:
            replay = replace(replay, launches=())  # measured with all of the model's heads
    pool = PoolConfig(
        slots=options.batch,
        max_seq_len=_max_seq_len(options.max_seq_len, geometry),
        activation=_activation(options.dtype, options.device),
    )
    weights = checkpoint_bytes(checkpoint, pool.activation.itemsize) // options.tensor_parallel_size
    geometry = shard_geometry(geometry, TensorParallel(options.tensor_parallel_size))
    plan = _plan(geometry, replay, pool, options, weights) if automatic else None
    if plan is not None:
        tokens = options.kv_cache.max_tokens
        most = None if tokens is None else tokens // pool.max_seq_len
        options = replace(options, max_batch_size=planned_batch(plan, most))
        pool = replace(pool, slots=options.batch)
    require_fit(geometry, replay, pool, options, weights)

    session = checkpoint_session(
        checkpoint, replay, pool, state_cache=options.state_cache, device=options.device, debug=options.debug,
        cuda_graphs=options.cuda_graphs, ranks=options.tensor_parallel_size, rank_timeout=options.rank_timeout,
    )  # fmt: skip
    return engine_over(session, model, tokenizer, options)


def engine_over(session: Session, model: str | Path, tokenizer: object, options: ReplicaOptions) -> Engine:
    """An engine over a session, with the tokenizer given or that of the directory `model`, and a drafter."""
    text = _tokenizer(model, tokenizer)
    config = options.engine_config(_prefix_config(options.kv_cache, session))
    keeps_ends = config.prefix is not None and config.prefix.outputs
    steps = steps_ahead(session, options.speculative, wanted=options.device_loop, keeps_ends=keeps_ends)
    return Engine(session, make_drafter(options.speculative, session), text, config, steps)


def _device_name(device: str) -> str:
    """The GPU's name as the driver gives it, "cpu" for anything else."""
    if not device.startswith("cuda"):
        return "cpu"
    import torch

    from trtllm_replayssm.runtime.session.device import usable_device

    return torch.cuda.get_device_name(usable_device(device)) if torch.cuda.is_available() else "cpu"


def _prefix_config(cache: KvCacheConfig, session: Session) -> PrefixConfig | None:
    if not cache.enable_block_reuse:
        return None
    need = prompt_snapshot_bytes(session.geometry, session.replay, session.pool.activation)
    return PrefixConfig(
        block=cache.tokens_per_block,
        budget=prefix_budget(cache.host_cache_size, need.total(cache.tokens_per_block)),
        outputs=cache.reuse_outputs,
    )


def make_drafter(speculative: SpeculativeConfig | None, session: Session) -> Drafter | None:
    """The drafter that the settings ask for; None for plain decoding."""
    if speculative is None:
        return None
    if isinstance(speculative, NGramDecodingConfig):
        return NGramDrafter(speculative.max_draft_len, speculative.max_matching_ngram_size)
    return MtpDrafter(SessionHead(session), speculative.draft_len, sample=speculative.sample_drafts)


def require_fit(
    geometry: ModelGeometry, replay: ReplayConfig, pool: PoolConfig, options: ReplicaOptions, weights: int,
    contexts: int = 0,
) -> None:  # fmt: skip
    """Raise ConfigError where settings ask for a head that is not there, or for more memory than there is.

    weights: bytes that the model takes on the device; contexts: those of engines' execution contexts.
    """
    require_slots(pool.slots, pool.max_seq_len, options.kv_cache.max_tokens)
    _require_head(options.speculative, geometry)
    plan = _plan(geometry, replay, pool, options, weights, contexts)
    if plan is not None:
        require_plan(plan, pool.slots)


def _require_head(speculative: SpeculativeConfig | None, geometry: ModelGeometry) -> None:
    if isinstance(speculative, MTPDecodingConfig) and not geometry.mtp_pattern:
        raise ConfigError(
            "LLM",
            "speculative_config",
            expected="a checkpoint with a multi-token-prediction head for MTPDecodingConfig",
            got=f"{geometry.name} without one",
            hint="Use NGramDecodingConfig",
        )


def _plan(
    geometry: ModelGeometry, replay: ReplayConfig, pool: PoolConfig, options: ReplicaOptions, weights: int,
    contexts: int = 0,
) -> MemoryPlan | None:  # fmt: skip
    settled = options.max_batch_size is not None or options.device == "cpu"
    slots = options.batch if settled else MAX_PLANNED_BATCH
    tokens = options.step_tokens(slots)
    return plan_replica(
        geometry, replay, pool, device=options.device, weights=weights, contexts=contexts,
        conventional=options.state_cache == "conventional", prompt_tokens=tokens,
        prompts=prompts_in_progress(tokens, options.prefill_chunk, reuse=options.kv_cache.enable_block_reuse),
        fraction=options.kv_cache.free_gpu_memory_fraction,
        drawn_drafts=isinstance(options.speculative, MTPDecodingConfig) and options.speculative.sample_drafts,
    )  # fmt: skip


def _max_seq_len(asked: int | None, geometry: ModelGeometry) -> int:
    if asked is None:
        return min(geometry.max_positions, DEFAULT_SEQ_LEN)
    if not 2 <= asked <= geometry.max_positions:
        raise ConfigError(
            "LLM", "max_seq_len", expected=f"2..{geometry.max_positions} (the model's positions)", got=asked
        )
    return asked


def _activation(dtype: str, device: str) -> ActivationDtype:
    if dtype == "auto":
        return ActivationDtype.FLOAT32 if device == "cpu" else ActivationDtype.BFLOAT16
    names = [member.value for member in ActivationDtype]
    if dtype not in names:
        raise ConfigError("LLM", "dtype", expected=["auto", *names], got=dtype)
    return ActivationDtype(dtype)


def _tokenizer(model: str | Path, tokenizer: object) -> Tokenizer | None:
    """The given tokenizer, or the checkpoint's own; None for a checkpoint without one (token ids only)."""
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    return load_tokenizer(model) if (Path(model) / "tokenizer.json").is_file() else None
