"""The tensors of a checkpoint directory, over one file or an index of shards."""

from __future__ import annotations

from pathlib import Path

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.weights.config_reader import load_json, shown
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile, Tensor
from trtllm_replayssm.weights.storage import checkpoint_error

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_shards(directory: Path) -> tuple[list[SafetensorsFile], dict[str, Tensor]]:
    """Every file and every tensor by its name in the files. Reads headers only."""
    single, index = directory / SINGLE, directory / INDEX
    if index.exists():
        weight_map = _weight_map(index)
        if single.exists() and SINGLE not in weight_map.values():
            raise checkpoint_error(str(directory), f"{SINGLE} or {INDEX}", "both", "Remove the one that is left over")
        return _open_indexed(directory, weight_map)
    if not single.exists():
        others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".gguf", ".safetensors"))
        raise checkpoint_error(str(directory), f"{SINGLE} or {INDEX}", others or "no weights")
    file = SafetensorsFile(single)
    return [file], dict(file.tensors)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = load_json(index).get("weight_map")
    except ConfigError as error:
        raise checkpoint_error(str(index), error.expected, error.got) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise checkpoint_error(str(index), "a weight_map from tensor to file name", type(weight_map).__name__)
    return weight_map


def _open_indexed(directory: Path, weight_map: dict[str, str]) -> tuple[list[SafetensorsFile], dict[str, Tensor]]:
    files: list[SafetensorsFile] = []
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise checkpoint_error(INDEX, "file names without a folder", shown(name))
        if not _is_file(directory / name):
            raise checkpoint_error(
                shown(name, str), "the file that the index names", "no such file", "Download the missing shard"
            )
        file = SafetensorsFile(directory / name)
        files.append(file)
        for tensor in file.tensors.values():
            if weight_map.get(tensor.name) != name:
                where = weight_map.get(tensor.name, "no file")
                raise checkpoint_error(tensor.name, f"in {where}, as the index says", f"in {name}")
            tensors[tensor.name] = tensor
    for tensor_name, file_name in weight_map.items():
        if tensor_name not in tensors:
            raise checkpoint_error(tensor_name, f"in {file_name}, as the index says", "no such tensor there")
    return files, tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long for the file system, or with characters that no name has
        return False
