"""The networks, each described once against `graph.Graph`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.models import nemotron_h, qwen3_5
from trtllm_replayssm.params import ParamSpec
from trtllm_replayssm.shapes import Family, ModelGeometry


@dataclass(frozen=True, slots=True)
class Model:
    """The functions of one family.

    parameters(geometry) lists every parameter; forward(graph, geometry, ids) runs the main network;
    mtp_forward(graph, geometry, next_ids, hidden) runs the multi-token-prediction head on pairs
    (token t + 1, hidden state of t after the final norm) and predicts token t + 2.
    """

    parameters: Callable[[ModelGeometry], list[ParamSpec]]
    forward: Callable[[Any, ModelGeometry, Any], ModelOutput[Any]]
    mtp_forward: Callable[[Any, ModelGeometry, Any, Any], ModelOutput[Any]]


_MODELS = {
    Family.NEMOTRON_H: Model(nemotron_h.parameters, nemotron_h.forward, nemotron_h.mtp_forward),
    Family.QWEN3_5: Model(qwen3_5.parameters, qwen3_5.forward, qwen3_5.mtp_forward),
}


def model_of(geometry: ModelGeometry) -> Model:
    """The network of a geometry's family."""
    return _MODELS[geometry.family]
