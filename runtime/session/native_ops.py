"""Whether a torch session runs its stateful operations by the CUDA kernels or by the reference."""

from __future__ import annotations

import logging

import torch

from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import LayerState, ReplayLayerState
from trtllm_replayssm.ops.native import NativeOps
from trtllm_replayssm.ops.native_experts import serves
from trtllm_replayssm.ops.native_library import find_library, load_library
from trtllm_replayssm.ops.native_prefill import NativePrefill
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.native_prompts import scanned_state

CAPABILITY = (9, 0)  # what the update's bulk copies need
_LOG = logging.getLogger(__name__)


def native_prefill(pools: StatePools, native: NativeOps | None) -> NativePrefill | None:
    """The kernels for prompts, where `native` serves the decode steps; None with a warning that says why."""
    scanned, path = scanned_state(pools), find_library()
    if native is None or scanned is None or path is None:
        return None
    prefill = NativePrefill(load_library(path))
    unsupported = prefill.unsupported(*scanned)
    if unsupported is None:
        return prefill
    _LOG.warning("prompts run the reference operations on %s: %s", pools.cursors.position.device, unsupported)
    return None


def native_ops(pools: StatePools) -> NativeOps | None:
    """The kernels, when the pools are on a CUDA device, the native library is found and serves them.

    On CUDA without them a single warning says why; elsewhere the reference is the only choice and nothing is said.
    Raises ConfigError or EngineMismatchError when the library that is named or found cannot be used at all, and
    ConfigError when it cannot launch a step as the settings ask.
    """
    device = pools.cursors.position.device
    if device.type != "cuda":
        return None
    path, first = find_library(), next(iter(pools.ssm.values()), None)
    if path is None:
        reason = "no native library found; docs/kernels.md says how to build it"
    elif torch.cuda.get_device_capability(device) < CAPABILITY:
        needed = ".".join(str(part) for part in CAPABILITY)
        reason = f"the kernels need compute capability {needed}, the device has less"
    elif first is None:
        reason = "the model has no recurrent layer"
    else:
        native = NativeOps(load_library(path), device)
        unsupported = native.unsupported(first, pools.cursors, torch_dtype(pools.pool.activation))
        if unsupported is None:
            _require_launches(pools, native, first)
            return native
        reason = unsupported
    _LOG.warning("decode steps run the reference operations on %s: %s", device, reason)
    return None


def _require_launches(pools: StatePools, native: NativeOps, layer: LayerState) -> None:
    if not isinstance(layer, ReplayLayerState) or not layer.config.launches:
        return
    device = pools.cursors.position.device
    multiprocessors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    native.require_launches(layer, pools.cursors, torch_dtype(pools.pool.activation), multiprocessors)


def waits_for_nothing(pools: StatePools, native: NativeOps | None) -> bool:
    """Whether a decode step runs without host synchronisation: by the kernels, its routed experts too."""
    return native is not None and not experts_wait(pools, native)


def experts_wait(pools: StatePools, native: NativeOps | None) -> bool:
    """Whether routed experts wait for the device in each pass: no kernels serve them."""
    moe = pools.geometry.moe
    if moe is None:
        return False
    width = pools.geometry.hidden if moe.latent is None else moe.latent
    return native is None or not serves(moe, width, torch_dtype(pools.pool.activation))
