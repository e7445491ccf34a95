"""A session over a bundle of TensorRT engines: what the build fixed is taken from its manifest, other wishes refused.

Not here: what the library and the files of the bundle must be; `TensorRtSession.from_bundle` checks that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.bundle_parts import rank_folder
from trtllm_replayssm.config import CudaGraphConfig, ReplayConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.manifest import Manifest
from trtllm_replayssm.runtime.checkpoint_session import rank_device, require_devices, shared_session
from trtllm_replayssm.runtime.replica import ReplicaOptions, require_fit
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.session.tensorrt_contexts import context_memory
from trtllm_replayssm.weights.tensor_parallel import TensorParallel, shard_geometry

if TYPE_CHECKING:  # torch is imported when a session is made, not before
    from trtllm_replayssm.runtime.session.ranks import Ranks

PLUGIN_FLAVOUR = "tensorrt"


def fitted(options: ReplicaOptions, manifest: Manifest) -> ReplicaOptions:
    """The settings with what the bundle fixes filled in. Raises ConfigError where they ask for anything else."""
    build = manifest.build
    fixed: dict[str, tuple[object, object]] = {
        "max_seq_len": (options.max_seq_len, build.max_seq_len),
        "dtype": (None if options.dtype == "auto" else options.dtype, build.activation),
        "state_cache": (options.state_cache, "replay"),
        "tensor_parallel_size": (
            None if options.tensor_parallel_size == 1 else options.tensor_parallel_size, build.tp_size,
        ),
        "mamba_ssm_cache_dtype": (
            None if options.kv_cache.mamba_ssm_cache_dtype == "auto" else options.kv_cache.mamba_ssm_cache_dtype,
            manifest.replay.recurrence.value,
        ),
        "replay_config": (_same_steps(options.replay, manifest.replay), manifest.replay),
    }
    for name, (asked, built) in fixed.items():
        if asked is not None and asked != built:
            raise ConfigError(
                "LLM", name, expected=f"{built}, as the bundle was built, or nothing", got=asked,
                hint="Build the bundle again for other settings",
            )  # fmt: skip
    if options.kernel_cache is not None and build.flavour == PLUGIN_FLAVOUR:
        raise ConfigError(
            "LLM", "kernel_cache", expected=f"none for {PLUGIN_FLAVOUR}, whose engines hold their kernels", got="one"
        )
    _at_most("max_batch_size", options.max_batch_size, build.max_batch, "--max-batch-size")
    _at_most("speculative_config", 1 + options.draft_len, manifest.replay.max_step_tokens, "--max-draft-len")
    _at_most("prefill_chunk", options.prefill_chunk, build.context_tokens, "--context-tokens")
    return replace(
        options,
        max_batch_size=options.max_batch_size or build.max_batch,
        max_seq_len=build.max_seq_len,
        prefill_chunk=options.prefill_chunk or build.context_tokens,
        tensor_parallel_size=build.tp_size,
    )  # fmt: skip


def bundle_session(parts: Sequence[Path], manifest: Manifest, options: ReplicaOptions) -> Session:
    """A session over the bundle's engines, of several GPUs the first one's; options: of `fitted`.

    parts: a folder per rank; manifest: the first one's. Raises ConfigError and EngineMismatchError when GPUs, library
    and bundle do not fit.
    """
    _require_gpu(manifest, options)
    pool, ranks = manifest.pool(options.batch), manifest.build.tp_size
    geometry = shard_geometry(manifest.geometry, TensorParallel(ranks))
    contexts = context_memory(manifest, options.batch, options.cuda_graphs if options.device != "cpu" else None)
    require_fit(geometry, manifest.replay, pool, options, file_bytes(parts[0]), contexts.total)
    if ranks == 1:
        from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession

        return TensorRtSession.from_bundle(
            parts[0], slots=options.batch, device=options.device, plugin_library=options.plugin_library,
            kernel_cache=options.kernel_cache, cuda_graphs=options.cuda_graphs,
        )  # fmt: skip
    require_devices(options.device, ranks)
    make = partial(
        rank_bundle_session, tuple(parts), slots=options.batch, device=options.device,
        plugin_library=options.plugin_library, kernel_cache=options.kernel_cache, cuda_graphs=options.cuda_graphs,
    )  # fmt: skip
    return shared_session(make, ranks, options.device, manifest.geometry, options.rank_timeout)


def file_bytes(part: Path) -> int:
    """What a rank's part takes on a device when it is loaded, without execution contexts: its files."""
    return sum(path.stat().st_size for path in part.rglob("*") if path.is_file())


def rank_bundle_session(
    parts: Sequence[Path], ranks: Ranks, *, slots: int, device: str, plugin_library: str | Path | None,
    kernel_cache: str | Path | None, cuda_graphs: CudaGraphConfig | None,
) -> Session:  # fmt: skip
    """One rank's session, in its own process. kernel_cache: each rank's file has its name behind it."""
    from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession

    rank = ranks.parallel.rank
    kernels = None if kernel_cache is None else f"{kernel_cache}.{rank_folder(rank)}"
    return TensorRtSession.from_bundle(
        parts[rank], slots=slots, device=rank_device(device, ranks), plugin_library=plugin_library, ranks=ranks,
        kernel_cache=kernels, cuda_graphs=cuda_graphs,
    )  # fmt: skip


def _require_gpu(manifest: Manifest, options: ReplicaOptions) -> None:
    """One error with everything that a bundle needs, before anything is loaded."""
    import torch

    build = manifest.build
    gpu = "as it was built on" if build.target == "current" else f"of compute capability {build.target}"
    gpus = "an NVIDIA GPU" if build.tp_size == 1 else f"{build.tp_size} NVIDIA GPUs"
    needs = f"what the bundle's engines need: {gpus} {gpu}, and {build.flavour} {build.tensorrt_version}"
    hint = "A checkpoint directory runs without a GPU"
    if not options.device.startswith("cuda"):
        hint = f"Give device 'cuda', or a checkpoint directory to run on {options.device}"
        raise ConfigError("LLM", "device", expected=needs, got=options.device, hint=hint)
    if not torch.cuda.is_available():
        got = "no GPU that torch sees"
        raise ConfigError("LLM", "device", expected=needs, got=got, hint=hint)
    if build.flavour == PLUGIN_FLAVOUR and options.plugin_library is None:
        raise ConfigError(
            "LLM", "plugin_library", expected="the plugin library of the bundle's engines", got="none",
            hint="Give the path of libtrtllm_replayssm_plugins.so",
        )  # fmt: skip


def _same_steps(asked: ReplayConfig | None, built: ReplayConfig) -> ReplayConfig | None:
    """Settings with the build's max_step_tokens, which follows from draft lengths and is no wish."""
    return None if asked is None else replace(asked, max_step_tokens=built.max_step_tokens)


def _at_most(name: str, asked: int | None, built: int, flag: str) -> None:
    if asked is not None and asked > built:
        what = f"at most {built}, which the bundle was built for"
        raise ConfigError("LLM", name, expected=what, got=asked, hint=f"Build with a larger {flag}")
