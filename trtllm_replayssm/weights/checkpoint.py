"""A checkpoint directory, validated when opened and read lazily: the one way to a model's weights.

Opening reads configurations and file headers only; elements are mapped when a parameter is asked for. Names are the
canonical ones of `models.model_of(geometry).parameters(geometry)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.params import ParamSpec
from trtllm_replayssm.shapes import Family, ModelGeometry
from trtllm_replayssm.weights.config_reader import load_json
from trtllm_replayssm.weights.hf_config import parse_config
from trtllm_replayssm.weights.layout import Layout, match_layout
from trtllm_replayssm.weights.matrix import ExpertStack, Matrix
from trtllm_replayssm.weights.names import canonical_name
from trtllm_replayssm.weights.quant_config import QuantConfig, read_quant_config
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile, Tensor
from trtllm_replayssm.weights.shards import open_shards
from trtllm_replayssm.weights.storage import MatrixStorage, checkpoint_error, read_scalar

_EMBEDDINGS = {Family.NEMOTRON_H: "backbone.embeddings.weight", Family.QWEN3_5: "model.embed_tokens.weight"}
_LM_HEAD = "lm_head.weight"


class Checkpoint:
    """Made by `open`. Arrays it hands out are read-only views that outlive it."""

    def __init__(
        self,
        *,
        directory: Path,
        geometry: ModelGeometry,
        quantization: QuantConfig | None,
        files: list[SafetensorsFile],
        layout: Layout,
        notes: list[str],
    ) -> None:
        self.directory = directory
        self.geometry = geometry
        self.quantization = quantization
        self._files = files
        self._layout = layout
        self._notes = notes
        self._open = True

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read and check configuration and headers; ConfigError or CheckpointError names what does not fit."""
        directory = Path(directory)
        if not (directory / "config.json").is_file():
            found = "no such directory"
            if directory.exists():
                found = "one without config.json" if directory.is_dir() else "a file"
            hint = "Give the folder of a downloaded checkpoint; names of hubs and presets are not looked up"
            raise checkpoint_error(str(directory), "a directory with config.json and *.safetensors", found, hint)
        config = load_json(directory / "config.json")
        geometry = parse_config(directory)
        quantization, notes = read_quant_config(directory, config)
        files, stored = open_shards(directory)
        tensors = _by_canonical_name(stored, geometry.family)
        geometry, extra_unused = _settle_heads(geometry, tensors, notes)
        layout = match_layout(geometry, tensors, extra_unused=extra_unused)
        _note_disagreements(layout, quantization, notes)
        return cls(
            directory=directory, geometry=geometry, quantization=quantization, files=files, layout=layout, notes=notes
        )

    def matrix(self, name: str) -> Matrix:
        """A LINEAR, EMBEDDING or ROUTER parameter, mapped; its scales are checked here."""
        storage: MatrixStorage = self._find(name, self._layout.matrices, "matrix")
        return storage.read()

    def vector(self, name: str) -> NDArray[np.float32]:
        """A VECTOR or CONV parameter as a float32 copy in its own shape ([n], or [channels, 1, K] for CONV)."""
        tensor: Tensor = self._find(name, self._layout.vectors, "vector")
        values = tensor.array().astype(np.float32)
        if not np.isfinite(values).all():
            raise checkpoint_error(tensor.name, "finite values", "NaN or infinity")
        return values

    def experts(self, name: str) -> ExpertStack:
        """An EXPERTS parameter, `<block>.experts.<projection>`; nothing is read before its `matrix(e)`."""
        storages = self._find(name, self._layout.stacks, "experts")
        experts, rows, columns = self._layout.specs[name].shape
        return ExpertStack((experts, rows, columns), lambda e: storages[e].read())

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """(k_scale, v_scale) of an attention layer by absolute index: k = k_fp8 * k_scale; 1 where none is stored."""
        self._check_open()
        if layer not in self.geometry.kv_layers:
            raise ContractError(
                "Checkpoint.kv_scales", "layer", expected=f"one of {self.geometry.kv_layers}", got=layer
            )
        if layer not in self._layout.kv_scales:
            return 1.0, 1.0
        k_scale, v_scale = self._layout.kv_scales[layer]
        return read_scalar(k_scale), read_scalar(v_scale)

    def names(self) -> list[str]:
        """Canonical names of all parameters, in the model's order."""
        return list(self._layout.specs)

    def matrix_names(self) -> list[str]:
        """Canonical names of the parameters that `storage` serves: matrices, then stacks of experts."""
        return [*self._layout.matrices, *self._layout.stacks]

    def spec(self, name: str) -> ParamSpec:
        """The specification of a parameter."""
        spec: ParamSpec = self._find(name, self._layout.specs, "spec")
        return spec

    def storage(self, name: str) -> list[MatrixStorage]:
        """Where a matrix (one entry) or a stack of experts (one per expert) lies in the files."""
        if name in self._layout.matrices:
            return [self._layout.matrices[name]]
        return list(self._find(name, self._layout.stacks, "storage"))

    def vector_storage(self, name: str) -> Tensor:
        """Where a vector lies in the files."""
        tensor: Tensor = self._find(name, self._layout.vectors, "vector_storage")
        return tensor

    def stored_tensors(self) -> list[Tensor]:
        """Every tensor of the files under its own name, the unused included, sorted by name."""
        return sorted((t for file in self._files for t in file.tensors.values()), key=lambda t: t.name)

    def unused(self) -> list[str]:
        """Names in the files of tensors knowingly not used: vision tower, activation and cache scales, ..."""
        return list(self._layout.unused)

    def notes(self) -> list[str]:
        """What was settled while opening and is worth telling the user, one sentence each."""
        return list(self._notes)

    def close(self) -> None:
        """Forget the files; arrays handed out stay valid."""
        self._open = False
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ContractError("Checkpoint", str(self.directory), expected="an open checkpoint", got="a closed one")

    def _find(self, name: str, table: Mapping[str, Any], what: str) -> Any:
        self._check_open()
        if name not in table:
            spec = self._layout.specs.get(name)
            got = f"{name!r}, which has role {spec.role.value}" if spec else f"the unknown name {name!r}"
            raise ContractError(f"Checkpoint.{what}", "name", expected=f"a parameter served by `{what}`", got=got)
        return table[name]


def _by_canonical_name(stored: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        canonical = canonical_name(name, family)
        if canonical in tensors:
            raise checkpoint_error(name, f"one tensor for {canonical}", f"also {tensors[canonical].name}")
        tensors[canonical] = tensor
    return tensors


def _settle_heads(
    geometry: ModelGeometry, tensors: Mapping[str, Tensor], notes: list[str]
) -> tuple[ModelGeometry, set[str]]:
    """The geometry that the tensors present have where config.json leaves it open, and the tensors that stay unused."""
    unused: set[str] = set()
    mtp = {name for name in tensors if name.startswith("mtp.")}
    if geometry.mtp_pattern and not mtp:
        geometry = replace(geometry, mtp_pattern=())
        notes.append("config.json announces a multi-token-prediction head, the files have none: loaded without it")
    elif mtp and not geometry.mtp_pattern:
        unused |= mtp
        notes.append("the files have a multi-token-prediction head that config.json does not announce: not used")
    head, table = tensors.get(_LM_HEAD), tensors.get(_EMBEDDINGS[geometry.family])
    if geometry.tie_embeddings and head is not None and table is not None:
        if head.dtype != table.dtype:
            geometry = replace(geometry, tie_embeddings=False)
            notes.append(
                f"config.json ties the embeddings, but lm_head is stored in its own format ({head.dtype}): used"
            )
        elif head.shape == table.shape and np.array_equal(_bytes(head), _bytes(table)):
            unused.add(_LM_HEAD)
            notes.append("lm_head.weight repeats the tied embeddings: not used")
        else:
            raise checkpoint_error(
                _LM_HEAD, f"the values of {table.name}, since config.json says tie_word_embeddings", "other values",
                "Set tie_word_embeddings to false if the head is meant to be its own",
            )  # fmt: skip
    return geometry, unused


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.array().reshape(-1).view(np.uint8)


def _note_disagreements(layout: Layout, quantization: QuantConfig | None, notes: list[str]) -> None:
    """Tell where the quantisation config and the tensors differ; the tensors win."""
    storages = [*layout.matrices.values(), *(s for stack in layout.stacks.values() for s in stack)]
    quantised = sum(s.format.quantised for s in storages)
    if quantization is None and quantised:
        notes.append(f"{quantised} matrices are quantised although no configuration says so: the tensors decide")
    elif quantization is not None and not quantised:
        notes.append(f"the configuration says {quantization.algorithm}, but no matrix is quantised")
    elif quantization is not None:
        differing = [
            s.weight.name
            for s in storages
            if (named := quantization.format_of(s.weight.name.removesuffix(".weight"))) not in (None, s.format)
            or (named is None and quantization.layers and s.format.quantised)
        ]
        if differing:
            notes.append(
                f"{len(differing)} matrices are stored otherwise than quantized_layers says, first {differing[0]}"
            )
    bias = [n for n, t in layout.vectors.items() if n.endswith("e_score_correction_bias") and t.dtype != "F32"]
    if bias:
        notes.append(f"{bias[0]} is stored in 16 bits: near-ties between experts may be decided by its rounding")
