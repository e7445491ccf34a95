"""Checks that a model in memory holds exactly its checkpoint file's values: a loader may re-randomise or drop some.

Needs torch and safetensors; the model is any torch module that follows transformers' names for the two families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

_EXPERT = re.compile(r"^(?P<block>.*\.experts)\.(?P<index>\d+)\.(?P<projection>\w+)\.weight$")


class LoadedParameterError(AssertionError):
    """A parameter in memory is not the one in the file."""


def file_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of `directory`/model.safetensors by their names in memory, single experts stacked to [E, out, in]."""
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = re.sub(r"^backbone\.", "model.", name)
        if match := _EXPERT.match(name):
            stacks.setdefault(f"{match['block']}.{match['projection']}", {})[int(match["index"])] = tensor
        else:
            tensors[name] = tensor
    for name, parts in stacks.items():
        tensors[name] = torch.stack([parts[i] for i in range(len(parts))])
    return tensors


def check_loaded(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> int:
    """Compare every parameter and persistent buffer of `model` (float32) with `tensors`, bit for bit; returns how many.

    Raises LoadedParameterError naming the first that differs, is missing, or was left unused by the model.
    """
    state = model.state_dict()
    if "lm_head.weight" not in tensors:  # tied: the module of the embedding a second time
        state.pop("lm_head.weight", None)
    for name, value in state.items():
        if name not in tensors:
            raise LoadedParameterError(f"check_loaded: {name}: expected a tensor in the file, got none")
        if value.dtype != torch.float32 or not torch.equal(value, tensors[name].to(torch.float32)):
            raise LoadedParameterError(f"check_loaded: {name}: expected the values of the file, got others")
    unused = sorted(set(tensors) - set(state))
    if unused:
        raise LoadedParameterError(f"check_loaded: {unused[0]}: expected to be used by the model, got left out")
    return len(state)
