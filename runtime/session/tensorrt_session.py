"""The TensorRT session: the steps, pools and rules of the torch session, with a bundle's programs as the model."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import Tensor

from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.manifest import Manifest, check_files, read_manifest, require_same
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.device import usable_device
from trtllm_replayssm.runtime.session.network import Network
from trtllm_replayssm.runtime.session.step_context import StepContext
from trtllm_replayssm.runtime.session.tensorrt_engines import PLUGIN_FLAVOUR, TensorRtEngines
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.tensorrt_program import Engines, ProgramRunner
from trtllm_replayssm.runtime.session.tensorrt_state import PluginState
from trtllm_replayssm.runtime.session.tensorrt_weights import BundleWeights
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint

MAIN, MTP = "main", "mtp"


class ProgramNetwork:
    """Implements `network.Network` by a bundle's programs."""

    def __init__(self, programs: ProgramRunner) -> None:
        self._programs = programs

    def forward(self, ctx: StepContext, ids: Tensor) -> ModelOutput[Tensor]:
        """See `Network.forward`."""
        return self._programs.run(MAIN, ctx, ids, None)

    def mtp_forward(self, ctx: StepContext, next_ids: Tensor, hidden: Tensor) -> ModelOutput[Tensor]:
        """See `Network.mtp_forward`."""
        return self._programs.run(MTP, ctx, next_ids, hidden)


class TensorRtSession(TorchSession):
    """Implements `session.base.Session` over an engine bundle.

    HAZARD: a masked position still enters the attention's products, with weight zero, and zero times NaN is NaN; so
    caches start as zeros, and those of a freed slot become zeros again.
    """

    def __init__(self, manifest: Manifest, directory: Path, engines: Engines, pools: StatePools) -> None:
        """directory: of the bundle, for what native operations read. engines: run the bundle's engine files.

        Raises EngineMismatchError when the pools are not those that the engines were built for.
        """
        require_same("TensorRtSession", pools.geometry, manifest.geometry)
        require_same("TensorRtSession", pools.replay, manifest.replay)
        activation = torch_dtype(ActivationDtype(manifest.build.activation))
        # native operations ask for vectors and experts only, which a bundle serves as a checkpoint does
        bundle = BundleWeights(directory, manifest.geometry)
        self._bundle, self._manifest, self._engines = bundle, manifest, engines
        weights = TorchWeights(cast(Checkpoint, bundle), activation, pools.cursors.position.device)
        super().__init__(weights, pools, cuda_graphs=None)  # programs move rows between slots with the host's help
        for slot in range(pools.pool.slots):
            self._clear_caches(slot)

    @classmethod
    def from_bundle(
        cls, directory: str | Path, *, slots: int | None = None, device: str = "cuda",
        plugin_library: str | Path | None = None,
    ) -> TensorRtSession:  # fmt: skip
        """Check a bundle and load it; plugin_library: for engines with plugins.

        Raises EngineMismatchError when bundle, library and GPU do not fit.
        """
        path = Path(directory)
        manifest = read_manifest(path)
        check_files(path, manifest)
        pools = pools_of(manifest, slots, device)
        engines = TensorRtEngines(path, manifest, pools.cursors.position.device, plugin_library)
        return cls(manifest, path, engines, pools)

    def free(self, slot: int) -> None:
        """See `Session.free`."""
        super().free(slot)
        self._clear_caches(slot)

    def _network(self) -> Network:
        plugins = None
        if self._manifest.build.flavour == PLUGIN_FLAVOUR:
            packed = self._bundle.packed_experts(self._manifest.programs.values())
            plugins = PluginState.of(self.pools, packed)
        ops = NativeStepOps(self.pools, self._state_ops, self._weights)
        return ProgramNetwork(ProgramRunner(self._manifest, self._engines, ops, self.pools, plugins=plugins))

    def _clear_caches(self, slot: int) -> None:
        for kv in self.pools.kv.values():
            for tensor in kv.tensors():
                tensor[slot].zero_()


def pools_of(manifest: Manifest, slots: int | None, device: str) -> StatePools:
    """Pools as the bundle's engines expect them; slots: at most, and by default, its max_batch."""
    most = manifest.build.max_batch
    count = most if slots is None else slots
    if not 1 <= count <= most:
        raise ConfigError(
            "TensorRtSession", "slots", expected=f"1..{most}, the max_batch that the bundle was built for", got=count,
            hint="Build with a larger --max-batch-size",
        )  # fmt: skip
    pool = PoolConfig(
        slots=count, max_seq_len=manifest.build.max_seq_len, activation=ActivationDtype(manifest.build.activation)
    )
    return StatePools.allocate(
        manifest.geometry, manifest.replay, pool, conventional=False, device=usable_device(device)
    )
