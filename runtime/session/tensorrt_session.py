"""The TensorRT session: the steps, pools and rules of the torch session, with a bundle's programs as the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from trtllm_replayssm.config import EVERY_BATCH, CudaGraphConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError, EngineMismatchError
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.manifest import MAIN, MTP, Manifest, check_files, read_manifest, require_same
from trtllm_replayssm.ops import native_draw
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.device import usable_device
from trtllm_replayssm.runtime.session.network import Network
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.runtime.session.step_context import StepContext
from trtllm_replayssm.runtime.session.tensorrt_engines import PLUGIN_FLAVOUR, TensorRtEngines
from trtllm_replayssm.runtime.session.tensorrt_kernels import KernelCache
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.tensorrt_program import Engines, ProgramRunner
from trtllm_replayssm.runtime.session.tensorrt_rows import rows_for
from trtllm_replayssm.runtime.session.tensorrt_state import PluginState
from trtllm_replayssm.runtime.session.tensorrt_weights import BundleWeights
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.weights.shard import WeightSource
from trtllm_replayssm.weights.tensor_parallel import ALONE, TensorParallel, shard_geometry


class ProgramNetwork:
    """Implements `network.Network` by a bundle's programs."""

    def __init__(self, programs: ProgramRunner, engines: Engines, ranks: Ranks | None, device: torch.device) -> None:
        """ranks: of the sessions that share the model, with tensors on `device`."""
        self._programs = programs
        self._engines = engines
        self._ranks, self._device = ranks, device

    def forward(self, ctx: StepContext, ids: Tensor) -> ModelOutput[Tensor]:
        """See `Network.forward`."""
        return self._programs.run(MAIN, ctx, ids, None)

    def mtp_forward(self, ctx: StepContext, next_ids: Tensor, hidden: Tensor) -> ModelOutput[Tensor]:
        """See `Network.mtp_forward`."""
        return self._programs.run(MTP, ctx, next_ids, hidden)

    def best(self, logits: Tensor) -> Tensor:
        """See `Network.best`: programs give every rank all logits."""
        return native_draw.likeliest(logits)

    def rows_for(self, slots: Sequence[int]) -> int:
        """See `Network.rows_for`: slot b is row b of every step."""
        return rows_for(slots)

    def obstacle(self) -> str | None:
        """See `Network.obstacle`. Ranks record together or not at all: their engines wait for each other."""
        own = self._engines.obstacle()
        if self._ranks is None:
            return own
        met = self._ranks.add_up(torch.tensor([own is not None], dtype=torch.float32, device=self._device))
        return own if own is not None or not met.any() else "another rank cannot record its engines"


class TensorRtSession(TorchSession):
    """Implements `session.base.Session` over an engine bundle.

    HAZARD: a masked position still enters the attention's products, with weight zero, and zero times NaN is NaN; so
    caches start as zeros, and those of a freed slot become zeros again.
    """

    def __init__(
        self, manifest: Manifest, directory: Path, engines: Engines, pools: StatePools, ranks: Ranks | None = None, *,
        cuda_graphs: CudaGraphConfig | None = EVERY_BATCH,
    ) -> None:  # fmt: skip
        """directory: of the bundle, for what native operations read. engines: run the bundle's engine files.
        ranks: the collectives of one of several sessions that share a model. cuda_graphs: as `TorchSession`; where an
        engine cannot be recorded, nothing is, and a warning says why.

        Raises EngineMismatchError when pools or rank are not those that the engines were built for.
        """
        parallel = require_rank(manifest, ranks)
        require_same("TensorRtSession", pools.geometry, shard_geometry(manifest.geometry, parallel))
        require_same("TensorRtSession", pools.replay, manifest.replay)
        require_same("TensorRtSession", pools.pool, manifest.pool(pools.pool.slots))
        activation = torch_dtype(ActivationDtype(manifest.build.activation))
        # native operations ask for vectors and experts only, which a bundle serves as a checkpoint does
        bundle = BundleWeights(directory, pools.geometry, parallel)
        self._bundle, self._manifest, self._engines = bundle, manifest, engines
        weights = TorchWeights(cast(WeightSource, bundle), activation, pools.cursors.position.device, ranks=ranks)
        super().__init__(weights, pools, cuda_graphs=cuda_graphs)
        for slot in range(pools.pool.slots):
            self._clear_caches(slot)

    @classmethod
    def from_bundle(
        cls, directory: str | Path, *, slots: int | None = None, device: str = "cuda",
        plugin_library: str | Path | None = None, ranks: Ranks | None = None,
        kernel_cache: str | Path | None = None, cuda_graphs: CudaGraphConfig | None = EVERY_BATCH,
    ) -> TensorRtSession:  # fmt: skip
        """Check a bundle, or a rank's part of one, and load it; plugin_library: for engines with plugins. kernel_cache:
        a file that `warm_up` and `close` leave what tensorrt_rtx has compiled in, and that the bundle's next session on
        this GPU starts from.

        Raises EngineMismatchError when bundle, rank, library and GPU do not fit.
        """
        path = Path(directory)
        manifest = read_manifest(path)
        require_rank(manifest, ranks)
        check_files(path, manifest)
        pools = pools_of(manifest, slots, device)
        communicator = None if ranks is None or manifest.build.flavour != PLUGIN_FLAVOUR else ranks.communicator()
        kernels = KernelCache(None if kernel_cache is None else Path(kernel_cache), path)
        engines = TensorRtEngines(path, manifest, pools.cursors.position.device, kernels, plugin_library, communicator)
        return cls(manifest, path, engines, pools, ranks, cuda_graphs=cuda_graphs)

    def warm_up(self) -> None:
        """See `Session.warm_up`."""
        super().warm_up()
        self._engines.save_kernels()

    def close(self) -> None:
        """See `Session.close`: what steps that are not recorded have compiled since the warm-up is kept too."""
        super().close()
        self._engines.save_kernels()

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
        programs = ProgramRunner(
            self._manifest, self._engines, ops, self.pools, recording=self._recording, plugins=plugins
        )
        return ProgramNetwork(programs, self._engines, self._weights.ranks, self.pools.cursors.position.device)

    def _clear_caches(self, slot: int) -> None:
        for kv in self.pools.kv.values():
            for tensor in kv.tensors():
                tensor[slot].zero_()


def require_rank(manifest: Manifest, ranks: Ranks | None) -> TensorParallel:
    """The rank that a bundle was built for. Raises EngineMismatchError when that is not the one of `ranks`."""
    built = TensorParallel(manifest.build.tp_size, manifest.build.tp_rank)
    own = ALONE if ranks is None else ranks.parallel
    if own != built:
        raise EngineMismatchError(
            "load bundle", "tp_rank", expected=f"rank {own.rank} of {own.size}",
            got=f"engines of rank {built.rank} of {built.size}",
            hint="Build the bundle with the --tp-size that it is run with, and --tp-rank all",
        )  # fmt: skip
    return built


def pools_of(manifest: Manifest, slots: int | None, device: str) -> StatePools:
    """Pools as the bundle's engines expect them; slots: at most, and by default, its max_batch."""
    most = manifest.build.max_batch
    count = most if slots is None else slots
    if not 1 <= count <= most:
        raise ConfigError(
            "TensorRtSession", "slots", expected=f"1..{most}, the max_batch that the bundle was built for", got=count,
            hint="Build with a larger --max-batch-size",
        )  # fmt: skip
    geometry = shard_geometry(manifest.geometry, TensorParallel(manifest.build.tp_size, manifest.build.tp_rank))
    target = usable_device(device, otherwise="Engines need")
    return StatePools.allocate(geometry, manifest.replay, manifest.pool(count), conventional=False, device=target)
