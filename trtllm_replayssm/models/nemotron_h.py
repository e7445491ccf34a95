"""Nemotron-H: one mixer per layer (Mamba-2, attention without positions, relu2 MLP or latent MoE) and its MTP head."""

from __future__ import annotations

from collections.abc import Callable

from trtllm_replayssm.graph import Graph, ModelOutput, MoeNames, Tensor
from trtllm_replayssm.params import Cut, ParamRole, ParamSpec, Span
from trtllm_replayssm.shapes import LayerKind, ModelGeometry

_EMBEDDINGS = "backbone.embeddings.weight"
_LM_HEAD = "lm_head.weight"
_FINAL_NORM = "backbone.norm_f.weight"


def parameters(geometry: ModelGeometry) -> list[ParamSpec]:
    """Every parameter of the network, the MTP head's included."""
    hidden, vocab = geometry.hidden, geometry.vocab
    specs = [ParamSpec(name=_EMBEDDINGS, shape=(vocab, hidden), role=ParamRole.EMBEDDING)]
    for index, kind in enumerate(geometry.layers):
        specs += _layer_parameters(geometry, f"backbone.layers.{index}.", kind, recipe=True)
    specs.append(_vector(_FINAL_NORM, hidden))
    if not geometry.tie_embeddings:
        cut = Cut(0, (Span(vocab, vocab),))
        specs.append(ParamSpec(name=_LM_HEAD, shape=(vocab, hidden), role=ParamRole.EMBEDDING, cut=cut))
    if geometry.mtp_pattern:
        first, last = "mtp.layers.0.", f"mtp.layers.{len(geometry.mtp_pattern) - 1}."
        specs += [
            _vector(first + "enorm.weight", hidden),
            _vector(first + "hnorm.weight", hidden),
            ParamSpec(name=first + "eh_proj.weight", shape=(hidden, 2 * hidden), role=ParamRole.LINEAR),
            _vector(last + "final_layernorm.weight", hidden),
        ]
        for index, kind in enumerate(geometry.mtp_pattern):
            specs += _layer_parameters(geometry, f"mtp.layers.{index}.", kind, recipe=False)
    return specs


def forward(g: Graph[Tensor], geometry: ModelGeometry, ids: Tensor) -> ModelOutput[Tensor]:
    """Logits and final hidden states."""
    h = g.embedding(ids, _EMBEDDINGS)
    for index, kind in enumerate(geometry.layers):
        h = _layer(g, geometry, h, f"backbone.layers.{index}.", kind, index)
    hidden = g.rms_norm(h, _FINAL_NORM, geometry.norm_eps, unit_offset=False)
    return ModelOutput(hidden, _head(g, geometry, hidden))


def mtp_forward(g: Graph[Tensor], geometry: ModelGeometry, next_ids: Tensor, hidden: Tensor) -> ModelOutput[Tensor]:
    """The MTP head on pairs (token t + 1, hidden of t); its hidden state feeds the next draft."""
    first, last = "mtp.layers.0.", f"mtp.layers.{len(geometry.mtp_pattern) - 1}."
    eps = geometry.norm_eps
    embedded = g.rms_norm(g.embedding(next_ids, _EMBEDDINGS), first + "enorm.weight", eps, unit_offset=False)
    previous = g.rms_norm(hidden, first + "hnorm.weight", eps, unit_offset=False)
    h = g.linear(g.concat([embedded, previous]), first + "eh_proj.weight")
    for index, kind in enumerate(geometry.mtp_pattern):
        h = _layer(g, geometry, h, f"mtp.layers.{index}.", kind, len(geometry.layers) + index)
    hidden = g.rms_norm(h, last + "final_layernorm.weight", geometry.norm_eps, unit_offset=False)
    return ModelOutput(hidden, _head(g, geometry, hidden))


def _head(g: Graph[Tensor], geometry: ModelGeometry, hidden: Tensor) -> Tensor:
    return g.lm_head(g.select_tokens(hidden), _EMBEDDINGS if geometry.tie_embeddings else _LM_HEAD)


def _layer(g: Graph[Tensor], geometry: ModelGeometry, h: Tensor, prefix: str, kind: LayerKind, index: int) -> Tensor:
    u = g.rms_norm(h, prefix + "norm.weight", geometry.norm_eps, unit_offset=False)
    mixer = prefix + "mixer."
    if kind is LayerKind.SSM:
        y = _mamba(g, geometry, u, mixer, index)
    elif kind is LayerKind.ATTENTION:
        y = _attention(g, geometry, u, mixer, index)
    elif kind is LayerKind.MOE:
        assert geometry.moe is not None
        y = g.moe(u, _moe_names(geometry, mixer), geometry.moe)
    else:
        y = g.linear(g.relu2(g.linear(u, mixer + "up_proj.weight")), mixer + "down_proj.weight")
    return g.add(h, y)


def _mamba(g: Graph[Tensor], geometry: ModelGeometry, u: Tensor, mixer: str, index: int) -> Tensor:
    ssm = geometry.ssm
    z, xbc, dt = g.split(g.linear(u, mixer + "in_proj.weight"), [ssm.inner, ssm.conv_channels, ssm.heads])
    bias = mixer + "conv1d.bias" if ssm.conv_bias else None
    xbc = g.causal_conv1d(xbc, mixer + "conv1d.weight", bias, layer=index, kernel=ssm.conv_kernel)
    x, k, q = g.split(xbc, [ssm.inner, ssm.key_channels, ssm.key_channels])
    o = g.mamba2(
        x,
        k,
        q,
        dt,
        layer=index,
        shape=ssm,
        a_log=mixer + "A_log",
        d_skip=mixer + "D",
        dt_bias=mixer + "dt_bias",
    )
    y = g.gated_rms_norm(o, z, mixer + "norm.weight", geometry.norm_eps, groups=ssm.groups, gate_first=True)
    return g.linear(y, mixer + "out_proj.weight")


def _attention(g: Graph[Tensor], geometry: ModelGeometry, u: Tensor, mixer: str, index: int) -> Tensor:
    att = geometry.attention
    q = g.split_heads(g.linear(u, mixer + "q_proj.weight"), att.heads)
    k = g.split_heads(g.linear(u, mixer + "k_proj.weight"), att.kv_heads)
    v = g.split_heads(g.linear(u, mixer + "v_proj.weight"), att.kv_heads)
    return g.linear(g.attention(q, k, v, layer=index, shape=att), mixer + "o_proj.weight")


def _moe_names(geometry: ModelGeometry, mixer: str) -> MoeNames:
    assert geometry.moe is not None
    latent = geometry.moe.latent is not None
    return MoeNames(
        router=mixer + "gate.weight",
        router_bias=mixer + "gate.e_score_correction_bias",
        experts=mixer + "experts",
        latent_in=mixer + "fc1_latent_proj.weight" if latent else None,
        latent_out=mixer + "fc2_latent_proj.weight" if latent else None,
        shared=mixer + "shared_experts",
        shared_gate=None,
    )


def _vector(name: str, size: int, cut: Cut | None = None) -> ParamSpec:
    return ParamSpec(name=name, shape=(size,), role=ParamRole.VECTOR, cut=cut)


def _layer_parameters(geometry: ModelGeometry, prefix: str, kind: LayerKind, *, recipe: bool) -> list[ParamSpec]:
    """Parameters of one layer; `recipe` says whether quantisation recipes may touch it (never the MTP head)."""
    hidden, att, mixer = geometry.hidden, geometry.attention, prefix + "mixer."
    dense, experts = ("dense", "experts") if recipe else (None, None)

    def linear(name: str, out_size: int, in_size: int, cut: Cut | None = None) -> ParamSpec:
        shape = (out_size, in_size)
        return ParamSpec(name=mixer + name, shape=shape, role=ParamRole.LINEAR, recipe=dense, cut=cut)

    specs = [_vector(prefix + "norm.weight", hidden)]
    if kind is LayerKind.SSM:
        specs += _mamba_parameters(geometry, mixer, linear)
    elif kind is LayerKind.ATTENTION:
        q, kv = Span(att.q_size, att.heads), Span(att.kv_size, att.kv_heads)
        specs += [
            linear("q_proj.weight", att.q_size, hidden, Cut(0, (q,))),
            linear("k_proj.weight", att.kv_size, hidden, Cut(0, (kv,))),
            linear("v_proj.weight", att.kv_size, hidden, Cut(0, (kv,))),
            linear("o_proj.weight", hidden, att.q_size, Cut(1, (q,))),
        ]
    elif kind is LayerKind.MLP:
        inner = Span(geometry.mlp_intermediate, geometry.mlp_intermediate)
        specs += [
            linear("up_proj.weight", geometry.mlp_intermediate, hidden, Cut(0, (inner,))),
            linear("down_proj.weight", hidden, geometry.mlp_intermediate, Cut(1, (inner,))),
        ]
    else:
        specs += _moe_parameters(geometry, mixer, linear, experts)
    return specs


def _mamba_parameters(geometry: ModelGeometry, mixer: str, linear: Callable[..., ParamSpec]) -> list[ParamSpec]:
    hidden, ssm = geometry.hidden, geometry.ssm
    inner, keys, heads = Span(ssm.inner, ssm.heads), Span(ssm.key_channels, ssm.groups), Span(ssm.heads, ssm.heads)
    conv, own = Cut(0, (inner, keys, keys)), Cut(0, (heads,))
    projected = ssm.inner + ssm.conv_channels + ssm.heads  # z | x | B | C | dt
    conv_shape = (ssm.conv_channels, 1, ssm.conv_kernel)
    return [
        linear("in_proj.weight", projected, hidden, Cut(0, (inner, inner, keys, keys, heads))),
        ParamSpec(name=mixer + "conv1d.weight", shape=conv_shape, role=ParamRole.CONV, cut=conv),
        *([_vector(mixer + "conv1d.bias", ssm.conv_channels, conv)] if ssm.conv_bias else []),
        _vector(mixer + "A_log", ssm.heads, own),
        _vector(mixer + "D", ssm.heads, own),
        _vector(mixer + "dt_bias", ssm.heads, own),
        _vector(mixer + "norm.weight", ssm.inner, Cut(0, (inner,))),
        linear("out_proj.weight", hidden, ssm.inner, Cut(1, (inner,))),
    ]


def _moe_parameters(
    geometry: ModelGeometry, mixer: str, linear: Callable[..., ParamSpec], recipe: str | None
) -> list[ParamSpec]:
    """recipe: the one that touches the experts."""
    hidden, moe = geometry.hidden, geometry.moe
    assert moe is not None
    width = moe.latent or hidden
    shared = Span(moe.shared_intermediate, moe.shared_intermediate)
    own = Cut(0, (Span(moe.experts, moe.experts),))
    specs = [
        ParamSpec(name=mixer + "gate.weight", shape=(moe.experts, hidden), role=ParamRole.ROUTER),
        _vector(mixer + "gate.e_score_correction_bias", moe.experts),
        linear("shared_experts.up_proj.weight", moe.shared_intermediate, hidden, Cut(0, (shared,))),
        linear("shared_experts.down_proj.weight", hidden, moe.shared_intermediate, Cut(1, (shared,))),
    ]
    for projection, rows, columns in (("up_proj", moe.intermediate, width), ("down_proj", width, moe.intermediate)):
        specs.append(
            ParamSpec(name=f"{mixer}experts.{projection}", shape=(moe.experts, rows, columns),
                      role=ParamRole.EXPERTS, recipe=recipe, cut=own)
        )  # fmt: skip
    if moe.latent:
        specs += [
            linear("fc1_latent_proj.weight", moe.latent, hidden),
            linear("fc2_latent_proj.weight", hidden, moe.latent),
        ]
    return specs
