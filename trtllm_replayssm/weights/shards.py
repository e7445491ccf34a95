"""The tensors of a checkpoint directory, over one file or an index of shards."""

from __future__ import annotations

from pathlib import Path

from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.weights.config_reader import load_json, shown
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile, Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_shards(directory: Path) -> tuple[list[SafetensorsFile], dict[str, Tensor]]:
    """Every file and every tensor by its name in the files. Reads headers only."""
    single, index = directory / SINGLE, directory / INDEX
    if index.exists():
        weight_map = _weight_map(index)
        if single.exists() and SINGLE not in weight_map.values():
            raise _error(str(directory), f"{SINGLE} or {INDEX}", "both", "Remove the one that is left over")
        return _open_indexed(directory, weight_map)
    if not single.exists():
        others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".gguf", ".safetensors"))
        raise _error(str(directory), f"{SINGLE} or {INDEX}", others or "no weights")
    file = SafetensorsFile(single)
    return [file], dict(file.tensors)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = load_json(index).get("weight_map")
    except ConfigError as error:
        raise _error(str(index), error.expected, error.got) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _error(str(index), "a weight_map from tensor to file name", type(weight_map).__name__)
    return weight_map


def _open_indexed(directory: Path, weight_map: dict[str, str]) -> tuple[list[SafetensorsFile], dict[str, Tensor]]:
    files: list[SafetensorsFile] = []
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise _error(INDEX, "file names without a folder", shown(name))
        if not _is_file(directory / name):
            raise _error(
                shown(name, str), "the file that the index names", "no such file", "Download the missing shard"
            )
        file = SafetensorsFile(directory / name)
        files.append(file)
        for tensor in file.tensors.values():
            if weight_map.get(tensor.name) != name:
                where = weight_map.get(tensor.name, "no file")
                raise _error(tensor.name, f"in {where}, as the index says", f"in {name}")
            tensors[tensor.name] = tensor
    for tensor_name, file_name in weight_map.items():
        if tensor_name not in tensors:
            raise _error(tensor_name, f"in {file_name}, as the index says", "no such tensor there")
    return files, tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long for the file system, or with characters that no name has
        return False


def _error(argument: str, expected: object, got: object, hint: str | None = None) -> CheckpointError:
    return CheckpointError("open checkpoint", argument, expected=expected, got=got, hint=hint)
