"""What ranks exchange inside a network: TensorRT's collective layers, which call NCCL (flavour `tensorrt`, 11.0+)."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.builders.network import Network

_NO_ROOT = -1
_ALL: list[int] = []  # ranks of a group; none named: all of them


def all_reduce(net: Network, x: Any, ranks: int, name: str) -> Any:
    """The sum of every rank's x, of any shape, in its type."""
    return _collective(net, x, ranks, name, net.trt.CollectiveOperation.ALL_REDUCE, net.trt.ReduceOperation.SUM)


def all_gather_last(net: Network, x: Any, ranks: int, name: str) -> Any:
    """x [B, K, C] of every rank -> [B, K, ranks C], rank after rank. The layer joins first axes: channels go there."""
    first = net.transpose(x, (2, 0, 1), f"{name} channels first")
    joined = _collective(net, first, ranks, name, net.trt.CollectiveOperation.ALL_GATHER, net.trt.ReduceOperation.NONE)
    return net.transpose(joined, (1, 2, 0), f"{name} channels last")


def _collective(net: Network, x: Any, ranks: int, name: str, operation: Any, reduce: Any) -> Any:
    layer = net.definition.add_dist_collective(x, operation, reduce, _NO_ROOT, _ALL)
    net.named(layer, name)
    layer.num_ranks = ranks  # before the output is read, whose extents follow
    return layer.get_output(0)
