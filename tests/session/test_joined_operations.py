"""With kernels, neighbouring operations of a layer run as one launch; no result may be read before its launch.

The kernels are stood in for by the formulas of the session without them, so that the session on a CPU takes the path
of CUDA; memory that is allocated without values is NaN. The logits then have the bits of the session without kernels.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.session.sessions import NAMES, force, open_session, sequence, start
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.ops import native_layers
from trtllm_replayssm.ops.native_layers import Function, HeadNorms, Rotation
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.session import torch_graph
from trtllm_replayssm.runtime.session.base import DecodeRow
from trtllm_replayssm.runtime.session.decode_attention import attend_caches
from trtllm_replayssm.runtime.session.step_context import HostRow
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.shapes import LayerKind


class Formulas:
    """The functions of `ops.native_layers` in plain torch; counts its calls."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        self.launches["norm"] += 1
        return _norm(x, weight, eps, unit_offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, total: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> Tensor:
        assert total.isnan().all(), "nothing has run yet"
        self.launches["sum and norm"] += 1
        total.copy_(x + residual)
        return _norm(total, weight, eps, unit_offset)

    def add_parts_rms_norm(
        self, parts: Tensor, residual: Tensor, total: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
    ) -> Tensor:
        self.launches["parts"] += 1
        return self.add_rms_norm(parts.sum(0), residual, total, weight, eps, unit_offset=unit_offset)

    def activation(self, function: Function, x: Tensor, factor: Tensor | None = None) -> Tensor:
        self.launches[function.name] += 1
        x = x.flatten(2) if x.dim() == 4 else x
        forms = {Function.SILU: functional.silu, Function.SIGMOID: torch.sigmoid}
        out: Tensor = functional.relu(x).square() if function is Function.RELU2 else forms[function](x)
        return out if factor is None else out * factor

    def attention_inputs(
        self, rows: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, caches: dict[str, Tensor], *,
        norms: HeadNorms | None, rotation: Rotation | None,
    ) -> Tensor:  # fmt: skip
        self.launches["inputs"] += 1
        if norms is not None:
            q = _norm(q, norms.q_weight, norms.eps, norms.unit_offset)
            k = _norm(k, norms.k_weight, norms.eps, norms.unit_offset)
        positions = rows["start"][:, None] + torch.arange(q.shape[1])
        if rotation is not None:
            q, k = _turned(q, positions, rotation), _turned(k, positions, rotation)
        for row, (slot, first, n) in enumerate(zip(*(rows[name].tolist() for name in rows), strict=True)):
            if slot >= 0:
                caches["keys"][slot, :, first : first + n] = k[row, :n].transpose(0, 1)
                caches["values"][slot, :, first : first + n] = v[row, :n].transpose(0, 1)
        return q

    def attention(self, rows: dict[str, Tensor], q: Tensor, caches: dict[str, Tensor]) -> Tensor:
        self.launches["attention"] += 1
        return attend_caches(q, KvLayer(**caches), host_rows(rows)).unflatten(-1, q.shape[2:])


def host_rows(rows: dict[str, Tensor]) -> list[HostRow]:
    columns = [rows[name].tolist() for name in ("slot", "num_tokens", "start")]
    return [HostRow(*numbers, last_chunk=False) for numbers in zip(*columns, strict=True)]


def in_parts(ops: StateOps, x: Tensor, weight: Tensor) -> Tensor:
    shares = zip(x.chunk(2, dim=-1), weight.chunk(2, dim=-1), strict=True)
    return torch.stack([functional.linear(*share) for share in shares])


def _norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + float(unit_offset))


def _turned(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation.cosine[positions][:, :, None], rotation.sine[positions][:, :, None]
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_joined_operations_give_the_bits_of_single_ones(
    name: str, monkeypatch: pytest.MonkeyPatch, unwritten_memory_is_nan: None, *, products: bool
) -> None:
    """products: join matrix products as well and make those before a sum in parts: other orders, equal up to noise."""
    tokens, formulas, results = sequence(name), Formulas(), []
    plain, joined = open_session(name), open_session(name)
    for session in (plain, joined):
        if session is joined:
            norms = ("rms_norm", "add_rms_norm", "add_parts_rms_norm")
            for function in (*norms, "activation", "attention_inputs", "attention"):
                monkeypatch.setattr(native_layers, function, getattr(formulas, function))
            monkeypatch.setattr(StateOps, "native_heads", True)
            if products:
                monkeypatch.setattr(StateOps, "linear_in_parts", in_parts)
            else:
                monkeypatch.setattr(torch_graph, "followers", lambda weight: [])
        slot, first = start(session, tokens[:20])
        after = force(session, slot, tokens[20:30])
        rows = [DecodeRow(-1, []), DecodeRow(slot, tokens[30:34])]
        verified: Any = session.decode(rows)[1]
        session.commit([0, 2])
        results.append(np.concatenate([first[None], after, verified]))
    assert np.isfinite(results[1]).all()
    assert abs(results[1] - results[0]).max() <= (REPLAY_LOGIT_NOISE if products else 0)
    geometry, calls = joined.geometry, 12
    attention = len(geometry.layers_of(LayerKind.ATTENTION))
    assert formulas.launches["inputs"] == attention * calls
    assert formulas.launches["attention"] == attention * (calls - 1), "a prompt goes row by row"
    sums, parts = formulas.launches["sum and norm"], formulas.launches["parts"]
    assert (parts > 0) is products and parts <= sums
    assert geometry.moe is not None or not products or parts == sums, "experts' sums alone have no parts"
    assert formulas.launches["norm"] == calls, "all norms but the first follow a sum"
