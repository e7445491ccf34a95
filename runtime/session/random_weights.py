"""Random parameters made on the device, without a checkpoint: for timing and memory at the public sizes.

Their formats are the public checkpoint's (`weights.precision_maps`) and their values have the sizes of
`weights.random_values`, so that activations stay finite through every layer. The same seed gives the same parameters
on the same kind of device.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.models import model_of
from trtllm_replayssm.ops.native_experts import ExpertStacks, PackedStack
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.packing import BLOCK_COLUMNS, GROUP_ROWS
from trtllm_replayssm.weights.precision_maps import published_format
from trtllm_replayssm.weights.random_values import (
    FP4_MEAN_SQUARE,
    matrix_size,
    unit_scale,
    vector_centre,
    vector_noise,
)

_E4M3_ONE = 0x38  # the code of 1


class RandomWeights(TorchWeights):
    """Parameters of `geometry`, whose layer 0 is layer `first_layer` of the public model `geometry.name`.

    dtype, device: as in `TorchWeights`. A parameter is made when it is first asked for and then kept.
    """

    def __init__(
        self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device, *, first_layer: int = 0, seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """ranks: `geometry` is that of one of them."""
        self.ranks = ranks
        self._geometry = geometry
        self._specs = {spec.name: spec for spec in model_of(geometry).parameters(geometry)}
        self._dtype = dtype
        self._device = device
        self._first_layer = first_layer
        self._seed = seed
        self._made: dict[str, Tensor] = {}
        self._stacks: dict[str, ExpertStacks] = {}

    def format_of(self, name: str) -> MatrixFormat:
        """Format of a matrix, or of a stack's experts, in the public checkpoint."""
        return published_format(self._geometry.name, name, self._first_layer)

    def matrix(self, name: str) -> Tensor:
        """[out, in] in the activation type."""
        return self._kept(name, self._dtype)

    def matrix_float32(self, name: str) -> Tensor:
        """[out, in] float32."""
        return self._kept(name, torch.float32)

    def vector(self, name: str) -> Tensor:
        """Vectors and convolution weights, float32."""
        return self._kept(name, torch.float32)

    def expert(self, name: str, expert: int) -> Tensor:
        """One expert's [out, in] of the stack `name`, in the activation type; made anew at every call."""
        _, rows, columns = self._specs[name].shape
        return self._noise(f"{name}.{expert}", (rows, columns), self._dtype).mul_(unit_scale(columns))

    def expert_stacks(self, prefix: str, *, gated: bool) -> ExpertStacks:
        """See `TorchWeights.expert_stacks`: random elements in the format of the public checkpoint."""
        if prefix not in self._stacks:
            self._stacks[prefix] = ExpertStacks(
                up=self._packed_noise(f"{prefix}.up_proj", 1 + gated), down=self._packed_noise(f"{prefix}.down_proj", 1)
            )
        return self._stacks[prefix]

    def _packed_noise(self, name: str, parts: int) -> PackedStack:
        experts, rows, columns = self._specs[name].shape
        if self.ranks is not None:
            experts = len(self.ranks.parallel.units(experts))
        kind, generator = self.format_of(name), self._generator(name)
        groups, blocks = -(-rows * parts // GROUP_ROWS), -(-columns // BLOCK_COLUMNS)
        shape, scale = (experts, groups, blocks, GROUP_ROWS * BLOCK_COLUMNS), None
        if kind is MatrixFormat.NVFP4:
            data = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=self._device)
            data.random_(0, 256, generator=generator)
            blocks_of_scales = (*shape[:-1], GROUP_ROWS * BLOCK_COLUMNS // FP4_BLOCK)
            ones = torch.full(blocks_of_scales, _E4M3_ONE, dtype=torch.uint8, device=self._device)
            scale = ones.view(torch.float8_e4m3fn)
            size = unit_scale(columns, FP4_MEAN_SQUARE)
        else:
            data, size = self._noise(name, shape, torch.bfloat16), unit_scale(columns)
            data = data.to(torch.float8_e4m3fn) if kind is MatrixFormat.FP8 else data
        factor = torch.full((experts, parts, 1), size, device=self._device)
        return PackedStack(rows=rows, columns=columns, parts=parts, data=data, block_scale=scale, factor=factor)

    def _kept(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._made:
            spec = self._specs[name]
            noise = self._noise(name, spec.shape, dtype)
            if spec.role in (ParamRole.VECTOR, ParamRole.CONV):
                noise.mul_(vector_noise(spec)).add_(vector_centre(spec))
            else:
                noise.mul_(matrix_size(spec, tied=self._geometry.tie_embeddings))
            if spec.role is ParamRole.ROUTER:
                noise = noise.bfloat16().to(dtype)  # what the public checkpoints hold
            self._made[name] = noise
        return self._made[name]

    def _noise(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers that depend on the seed and the name alone, not on the order of use."""
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
