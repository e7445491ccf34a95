"""What the plugin layers of a network compute, with the reference operations, from their fields and inputs alone.

Written from `builders/plugin_fields.py` as the plugin library is: the order of inputs, channel offsets and codes are
read here a second time, so that a builder that fills them otherwise gives other numbers. No test here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.builders.recorded_tensorrt import PluginCall
from tests.weights.test_packing import read_back
from trtllm_replayssm.bindings import CONV1D, GDN, MAMBA2, MOE, ROUTE
from trtllm_replayssm.builders.plugin_fields import PLUGINS, STATE_FORMAT_CODES, WEIGHT_FORMAT_CODES
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.reference import conv1d, flush, gdn, mamba2, prefill
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.runtime.session.torch_moe import route
from trtllm_replayssm.shapes import MoeShape, Router, SsmKind, SsmShape
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.packing import PackedMatrix

FROM_ZERO, FROM_CARRY, TO_CARRY = 1, 2, 4
FORMATS = {code: fmt for fmt, code in STATE_FORMAT_CODES.items()}
FORMAT_OF_CODE = {code: fmt for fmt, code in WEIGHT_FORMAT_CODES.items()}


class PluginMemory(dict[str, Tensor]):
    """Tensors of one run; a plugin's outputs are computed when a layer first reads one of them."""

    def __init__(self, values: Mapping[str, Tensor], calls: list[PluginCall]) -> None:
        super().__init__(values)
        self._calls = {name: call for call in calls for name in call.outputs}

    def __missing__(self, name: str) -> Tensor:
        call = self._calls[name]
        self.update(zip(call.outputs, run_plugin(call, [self[tensor.name] for tensor in call.inputs]), strict=True))
        return self[name]


def run_plugin(call: PluginCall, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The own outputs [B, T, width]: in the activation type, or ids and weights; state is updated in place."""
    spec, fields = PLUGINS[call.plugin.name], call.plugin.fields
    names = (*spec.data, *spec.rows, *spec.cursors, *spec.weights)
    named = dict(zip(names, inputs, strict=False))
    rest = inputs[len(names) :]
    if spec.name == ROUTE:
        assert not rest
        return _choices(fields, named)
    out = {MAMBA2: _recurrence, GDN: _recurrence, CONV1D: _convolution, MOE: _experts}[spec.name](fields, named, rest)
    return (out.to(named[spec.data[0]].dtype),)


def _channels(fields: Mapping[str, int], named: Mapping[str, Tensor], name: str, heads: int, width: int) -> Tensor:
    """The range of a projection that an argument is, [B, T, heads, width], or [B, T, heads] for width 0."""
    start, size = fields[f"{name}_offset"], heads * max(width, 1)
    part = named[name][..., start : start + size]
    return part.unflatten(-1, (heads, width)) if width else part


def _rows(named: Mapping[str, Tensor]) -> StepRows:
    slot, tokens = named["slot"].long(), named["num_tokens"].long()
    return StepRows(slot, tokens)


def _convolution(fields: Mapping[str, int], named: Mapping[str, Tensor], rest: list[Tensor]) -> Tensor:
    (window,) = rest
    position = named["cursor_position"]
    cursors = CursorTensors(position, position, position, position)  # the convolution uses the position alone
    x = _channels(fields, named, "x", fields["channels"], 0)
    assert named["weight"].shape == (fields["channels"], 1, fields["kernel"])
    return conv1d.conv1d_update(window, cursors, _rows(named), x, named["weight"], named["bias"])


def _recurrence(fields: Mapping[str, int], named: Mapping[str, Tensor], rest: list[Tensor]) -> Tensor:
    shape, config = _shape(fields, gdn="v" in named), _config(fields)
    *parts, carry = rest
    state = _layer_state(shape, config, fields["layer"], parts)
    cursors = CursorTensors(named["origin"], named["h"], named["cursor_position"], named["seed"])
    rows = _rows(named)
    groups, heads = (fields["groups"], fields["state_dim"]), (fields["heads"], fields["head_dim"])
    k, q = (_channels(fields, named, n, *groups) for n in ("k", "q"))
    value = _channels(fields, named, "v" if "v" in named else "x", *heads)
    if len(named["phase"]) == 2:
        return _chunks(state, cursors, rows, named, (value, k, q), carry, fields)
    if "v" in named:
        g, beta = (_channels(fields, named, n, fields["heads"], 0) for n in ("log_decay", "beta"))
        return gdn.gdn_update(state, cursors, rows, q, k, value, g, beta).flatten(-2)
    dt = _channels(fields, named, "dt", fields["heads"], 0)
    return mamba2.mamba2_update(
        state, cursors, rows, value, k, q, dt, named["a"], d_skip=named["skip"]
    ).flatten(-2)


def _chunks(
    state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, named: Mapping[str, Tensor],
    projections: tuple[Tensor, Tensor, Tensor], carry: Tensor, fields: Mapping[str, int],
) -> Tensor:  # fmt: skip
    """Prompt chunks: from zero, from the carry, or from the checkpoint; into the carry or the checkpoint."""
    value, k, q = projections
    out = torch.zeros(value.shape)
    for row in rows.active.tolist():
        n, slot = int(rows.num_tokens[row]), rows.slot[row : row + 1]
        flags, place = int(named["row_flags"][row]), int(named["carry_index"][row])
        if flags & FROM_CARRY:
            initial = carry[place].clone()
        elif flags & FROM_ZERO:
            initial = torch.zeros(carry.shape[1:])
        elif "v" in named:
            initial = gdn.gdn_fold(state, cursors, slot)[0]
        else:
            initial = mamba2.mamba2_fold(state, cursors, slot, named["a"])[0]
        tokens = [t[row, :n] for t in (value, k, q)]
        if "v" in named:
            g, beta = (_channels(fields, named, x, fields["heads"], 0)[row, :n] for x in ("log_decay", "beta"))
            o, final = prefill.gdn_scan(state.shape, initial, tokens[2], tokens[1], tokens[0], g, beta)
        else:
            dt = _channels(fields, named, "dt", fields["heads"], 0)[row, :n]
            o, final = prefill.mamba2_scan(state.shape, initial, *tokens, dt, named["a"])
            o = o + named["skip"][:, None] * tokens[0].float()
        out[row, :n] = o
        if flags & TO_CARRY:
            carry[place] = final
        else:
            flush.store_checkpoints(state, cursors, slot, final[None], cursors.position[slot] + n)
    return out.flatten(-2)


def _choices(fields: Mapping[str, Any], named: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """ids int32 and weights float32 [B, T, top_k]; -1 and 0 for tokens that do not exist."""
    shape = MoeShape(
        experts=fields["experts"], top_k=fields["top_k"], intermediate=1, latent=None, shared_intermediate=1,
        gated=False, shared_gated=False, router=Router.SIGMOID_BIAS if fields["router"] else Router.SOFTMAX,
        n_group=fields["groups"], topk_group=fields["topk_group"], norm_topk=bool(fields["norm_topk"]),
        scaling=fields["scaling"],
    )  # fmt: skip
    logits = _channels(fields, named, "logits", fields["experts"], 0)
    assert named["router_bias"].shape == (fields["experts"],)
    there = (torch.arange(logits.shape[1]) < named["num_tokens"][:, None]) & (named["slot"] >= 0)[:, None]
    ids = torch.full((*there.shape, shape.top_k), -1, dtype=torch.int32)
    weights = torch.zeros(ids.shape)
    found, weights[there] = route(logits[there], named["router_bias"], shape)
    ids[there] = found.int()
    return ids, weights


def _experts(fields: Mapping[str, Any], named: Mapping[str, Tensor], rest: list[Tensor]) -> Tensor:
    """Every chosen expert of every token, one at a time; ids outside 0 .. experts - 1 give no work."""
    fmt, parts = FORMAT_OF_CODE[fields["weight_format"]], 1 + fields["gated"]
    size = 3 if fmt is MatrixFormat.NVFP4 else 2
    assert len(rest) == 2 * size and all(len(part) == fields["experts"] for part in rest)
    ids, weights = (_channels(fields, named, name, fields["top_k"], 0) for name in ("ids", "weights"))
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    x = _channels(fields, named, "x", fields["width"], 0).float()
    out = torch.zeros(x.shape)
    for b, t in torch.nonzero(((ids >= 0) & (ids < fields["experts"])).any(-1)).tolist():
        for expert, weight in zip(ids[b, t].tolist(), weights[b, t], strict=True):
            if not 0 <= expert < fields["experts"]:
                continue
            *gate, up = _decoded(fmt, rest[:size], expert, fields["intermediate"], fields["width"], parts)
            (down,) = _decoded(fmt, rest[size:], expert, fields["width"], fields["intermediate"], 1)
            inner = functional.linear(x[b, t], up)
            inner = functional.silu(functional.linear(x[b, t], gate[0])) * inner if gate else inner.relu().square()
            out[b, t] += weight * functional.linear(inner, down)
    return out


def _decoded(
    fmt: MatrixFormat, stack: list[Tensor], expert: int, rows: int, columns: int, parts: int
) -> list[Tensor]:
    """One expert's matrices from its bytes, scales and factors, float32: gate and up, or one."""
    data, *scale, factor = (part[expert].contiguous().numpy() for part in stack)
    codes = scale[0].view(np.uint8) if scale else None
    packed = PackedMatrix(fmt, rows, columns, data.view(np.uint8), codes, factor)
    return [torch.from_numpy(matrix[:, :columns].astype(np.float32)) for matrix in read_back(packed, parts)]


def _shape(fields: Mapping[str, int], *, gdn: bool) -> SsmShape:
    return SsmShape(
        kind=SsmKind.GDN if gdn else SsmKind.MAMBA2, heads=fields["heads"], groups=fields["groups"],
        head_dim=fields["head_dim"], state_dim=fields["state_dim"], conv_kernel=1, conv_bias=False,
        first_head=fields["head_offset"],
    )  # fmt: skip


def _config(fields: Mapping[str, int]) -> ReplayConfig:
    recurrence = FORMATS[fields["recurrence"]]
    assert recurrence is not None
    return ReplayConfig(
        window=fields["window"], max_step_tokens=fields["max_step_tokens"], recurrence=recurrence,
        read=FORMATS[fields["read"]],
    )  # fmt: skip


def _layer_state(shape: SsmShape, config: ReplayConfig, layer: int, parts: list[Tensor]) -> ReplayLayerState:
    """The state tensors in the order in which a plugin takes them."""
    left = list(parts)
    checkpoint = _store(config.recurrence, left)
    read = None if config.read is None else _store(config.read, left)
    value, key, decay, *more = left
    factor, ring_v, ring_beta = (*more, None, None, None)[:3]
    return ReplayLayerState(
        shape=shape, config=config, layer=layer, checkpoint=checkpoint, read_copy=read, ring_value=value, ring_key=key,
        ring_decay=decay, ring_key_factor=factor, ring_v=ring_v, ring_beta=ring_beta,
    )  # fmt: skip


def _store(fmt: StateFormat, left: list[Tensor]) -> StateStore:
    data = left.pop(0)
    block = left.pop(0) if fmt in (StateFormat.FP8, StateFormat.NVFP4) else None
    head = left.pop(0) if fmt is StateFormat.NVFP4 else None
    return StateStore(fmt, data.view(torch.uint8) if fmt is StateFormat.NVFP4 else data, block, head)
