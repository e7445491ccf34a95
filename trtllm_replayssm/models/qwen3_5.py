"""Qwen3.5: Gated DeltaNet and gated-attention layers, each followed by SwiGLU or MoE, and the MTP head."""

from __future__ import annotations

from collections.abc import Callable

from trtllm_replayssm.graph import Graph, ModelOutput, MoeNames, Tensor
from trtllm_replayssm.params import Cut, ParamRole, ParamSpec, Span
from trtllm_replayssm.shapes import LayerKind, ModelGeometry

_EMBEDDINGS = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_FINAL_NORM = "model.norm.weight"


def parameters(geometry: ModelGeometry) -> list[ParamSpec]:
    """Every parameter of the text network, the MTP head's included."""
    hidden, vocab = geometry.hidden, geometry.vocab
    specs = [ParamSpec(name=_EMBEDDINGS, shape=(vocab, hidden), role=ParamRole.EMBEDDING)]
    for index, kind in enumerate(geometry.layers):
        specs += _layer_parameters(geometry, f"model.layers.{index}.", kind, recipe=True)
    specs.append(_vector(_FINAL_NORM, hidden))
    if not geometry.tie_embeddings:
        cut = Cut(0, (Span(vocab, vocab),))
        specs.append(ParamSpec(name=_LM_HEAD, shape=(vocab, hidden), role=ParamRole.EMBEDDING, cut=cut))
    if geometry.mtp_pattern:
        specs += [
            ParamSpec(name="mtp.fc.weight", shape=(hidden, 2 * hidden), role=ParamRole.LINEAR),
            _vector("mtp.norm.weight", hidden),
            _vector("mtp.pre_fc_norm_embedding.weight", hidden),
            _vector("mtp.pre_fc_norm_hidden.weight", hidden),
        ]
        for index, kind in enumerate(geometry.mtp_pattern):
            specs += _layer_parameters(geometry, f"mtp.layers.{index}.", kind, recipe=False)
    return specs


def forward(g: Graph[Tensor], geometry: ModelGeometry, ids: Tensor) -> ModelOutput[Tensor]:
    """Logits and final hidden states."""
    h = g.embedding(ids, _EMBEDDINGS)
    for index, kind in enumerate(geometry.layers):
        h = _layer(g, geometry, h, f"model.layers.{index}.", kind, index)
    hidden = g.rms_norm(h, _FINAL_NORM, geometry.norm_eps, unit_offset=True)
    return ModelOutput(hidden, _head(g, geometry, hidden))


def mtp_forward(g: Graph[Tensor], geometry: ModelGeometry, next_ids: Tensor, hidden: Tensor) -> ModelOutput[Tensor]:
    """The MTP head on pairs (token t + 1, hidden of t); its hidden state feeds the next draft."""
    eps = geometry.norm_eps
    embedded = g.rms_norm(g.embedding(next_ids, _EMBEDDINGS), "mtp.pre_fc_norm_embedding.weight", eps, unit_offset=True)
    previous = g.rms_norm(hidden, "mtp.pre_fc_norm_hidden.weight", eps, unit_offset=True)
    h = g.linear(g.concat([embedded, previous]), "mtp.fc.weight")
    for index, kind in enumerate(geometry.mtp_pattern):
        h = _layer(g, geometry, h, f"mtp.layers.{index}.", kind, len(geometry.layers) + index)
    hidden = g.rms_norm(h, "mtp.norm.weight", eps, unit_offset=True)
    return ModelOutput(hidden, _head(g, geometry, hidden))


def _head(g: Graph[Tensor], geometry: ModelGeometry, hidden: Tensor) -> Tensor:
    return g.lm_head(g.select_tokens(hidden), _EMBEDDINGS if geometry.tie_embeddings else _LM_HEAD)


def _layer(g: Graph[Tensor], geometry: ModelGeometry, h: Tensor, prefix: str, kind: LayerKind, index: int) -> Tensor:
    eps = geometry.norm_eps
    u = g.rms_norm(h, prefix + "input_layernorm.weight", eps, unit_offset=True)
    if kind is LayerKind.SSM:
        h = g.add(h, _gdn(g, geometry, u, prefix + "linear_attn.", index))
    else:
        h = g.add(h, _attention(g, geometry, u, prefix + "self_attn.", index))
    u = g.rms_norm(h, prefix + "post_attention_layernorm.weight", eps, unit_offset=True)
    mlp = prefix + "mlp."
    if geometry.moe is not None:
        return g.add(h, g.moe(u, _moe_names(mlp), geometry.moe))
    gate = g.silu(g.linear(u, mlp + "gate_proj.weight"))
    return g.add(h, g.linear(g.mul(gate, g.linear(u, mlp + "up_proj.weight")), mlp + "down_proj.weight"))


def _gdn(g: Graph[Tensor], geometry: ModelGeometry, u: Tensor, p: str, index: int) -> Tensor:
    ssm = geometry.ssm
    qkv = g.linear(u, p + "in_proj_qkv.weight")
    qkv = g.causal_conv1d(qkv, p + "conv1d.weight", None, layer=index, kernel=ssm.conv_kernel)
    q, k, v = g.split(qkv, [ssm.key_channels, ssm.key_channels, ssm.inner])
    o = g.gdn(
        q,
        k,
        v,
        g.linear(u, p + "in_proj_a.weight"),
        g.linear(u, p + "in_proj_b.weight"),
        layer=index,
        shape=ssm,
        a_log=p + "A_log",
        dt_bias=p + "dt_bias",
    )
    z = g.linear(u, p + "in_proj_z.weight")
    y = g.gated_rms_norm(o, z, p + "norm.weight", geometry.norm_eps, groups=ssm.heads, gate_first=False)
    return g.linear(y, p + "out_proj.weight")


def _attention(g: Graph[Tensor], geometry: ModelGeometry, u: Tensor, p: str, index: int) -> Tensor:
    att, eps = geometry.attention, geometry.norm_eps
    q_gate = g.split_heads(g.linear(u, p + "q_proj.weight"), att.heads)  # per head: q then its gate
    q, gate = g.split(q_gate, [att.head_dim, att.head_dim])
    k = g.split_heads(g.linear(u, p + "k_proj.weight"), att.kv_heads)
    v = g.split_heads(g.linear(u, p + "v_proj.weight"), att.kv_heads)
    q = g.rope(g.rms_norm(q, p + "q_norm.weight", eps, unit_offset=True), att.rotary_dim, att.rope_theta)
    k = g.rope(g.rms_norm(k, p + "k_norm.weight", eps, unit_offset=True), att.rotary_dim, att.rope_theta)
    o = g.attention(q, k, v, layer=index, shape=att)
    return g.linear(g.mul(o, g.sigmoid(g.merge_heads(gate))), p + "o_proj.weight")


def _moe_names(mlp: str) -> MoeNames:
    return MoeNames(
        router=mlp + "gate.weight",
        router_bias=None,
        experts=mlp + "experts",
        latent_in=None,
        latent_out=None,
        shared=mlp + "shared_expert",
        shared_gate=mlp + "shared_expert_gate.weight",
    )


def _vector(name: str, size: int, cut: Cut | None = None) -> ParamSpec:
    return ParamSpec(name=name, shape=(size,), role=ParamRole.VECTOR, cut=cut)


def _layer_parameters(geometry: ModelGeometry, prefix: str, kind: LayerKind, *, recipe: bool) -> list[ParamSpec]:
    """Parameters of one layer; `recipe` says whether quantisation recipes may touch it (never the MTP head)."""
    hidden = geometry.hidden
    dense, experts = ("dense", "experts") if recipe else (None, None)

    def linear(name: str, out_size: int, in_size: int, cut: Cut | None = None) -> ParamSpec:
        shape = (out_size, in_size)
        return ParamSpec(name=prefix + name, shape=shape, role=ParamRole.LINEAR, recipe=dense, cut=cut)

    specs = [
        _vector(prefix + "input_layernorm.weight", hidden),
        _vector(prefix + "post_attention_layernorm.weight", hidden),
    ]
    specs += (_gdn_parameters if kind is LayerKind.SSM else _attention_parameters)(geometry, prefix, linear)
    if geometry.moe is not None:
        return specs + _moe_parameters(geometry, prefix, linear, experts)
    return specs + _swiglu_parameters("mlp.", hidden, geometry.mlp_intermediate, linear)


def _gdn_parameters(geometry: ModelGeometry, prefix: str, linear: Callable[..., ParamSpec]) -> list[ParamSpec]:
    hidden, ssm, p = geometry.hidden, geometry.ssm, prefix + "linear_attn."
    inner, keys, heads = Span(ssm.inner, ssm.heads), Span(ssm.key_channels, ssm.groups), Span(ssm.heads, ssm.heads)
    conv, own = Cut(0, (keys, keys, inner)), Cut(0, (heads,))
    conv_shape = (ssm.conv_channels, 1, ssm.conv_kernel)
    return [
        linear("linear_attn.in_proj_qkv.weight", ssm.conv_channels, hidden, conv),
        linear("linear_attn.in_proj_z.weight", ssm.inner, hidden, Cut(0, (inner,))),
        linear("linear_attn.in_proj_a.weight", ssm.heads, hidden, own),
        linear("linear_attn.in_proj_b.weight", ssm.heads, hidden, own),
        ParamSpec(name=p + "conv1d.weight", shape=conv_shape, role=ParamRole.CONV, cut=conv),
        _vector(p + "A_log", ssm.heads, own),
        _vector(p + "dt_bias", ssm.heads, own),
        _vector(p + "norm.weight", ssm.head_dim),
        linear("linear_attn.out_proj.weight", hidden, ssm.inner, Cut(1, (inner,))),
    ]


def _attention_parameters(geometry: ModelGeometry, prefix: str, linear: Callable[..., ParamSpec]) -> list[ParamSpec]:
    hidden, att, p = geometry.hidden, geometry.attention, prefix + "self_attn."
    q, kv = Span(att.q_size, att.heads), Span(att.kv_size, att.kv_heads)
    return [
        linear("self_attn.q_proj.weight", 2 * att.q_size, hidden, Cut(0, (Span(2 * att.q_size, att.heads),))),
        linear("self_attn.k_proj.weight", att.kv_size, hidden, Cut(0, (kv,))),
        linear("self_attn.v_proj.weight", att.kv_size, hidden, Cut(0, (kv,))),
        linear("self_attn.o_proj.weight", hidden, att.q_size, Cut(1, (q,))),
        _vector(p + "q_norm.weight", att.head_dim),
        _vector(p + "k_norm.weight", att.head_dim),
    ]


def _swiglu_parameters(name: str, hidden: int, inner: int, linear: Callable[..., ParamSpec]) -> list[ParamSpec]:
    span = Span(inner, inner)
    return [
        linear(name + "gate_proj.weight", inner, hidden, Cut(0, (span,))),
        linear(name + "up_proj.weight", inner, hidden, Cut(0, (span,))),
        linear(name + "down_proj.weight", hidden, inner, Cut(1, (span,))),
    ]


def _moe_parameters(
    geometry: ModelGeometry, prefix: str, linear: Callable[..., ParamSpec], recipe: str | None
) -> list[ParamSpec]:
    """recipe: the one that touches the experts."""
    hidden, moe = geometry.hidden, geometry.moe
    assert moe is not None
    specs = [
        ParamSpec(name=prefix + "mlp.gate.weight", shape=(moe.experts, hidden), role=ParamRole.ROUTER),
        # one output row: kept in the checkpoint's type, never quantised
        ParamSpec(name=prefix + "mlp.shared_expert_gate.weight", shape=(1, hidden), role=ParamRole.LINEAR),
        *_swiglu_parameters("mlp.shared_expert.", hidden, moe.shared_intermediate, linear),
    ]
    own = Cut(0, (Span(moe.experts, moe.experts),))
    for projection, shape in (
        ("gate_proj", (moe.experts, moe.intermediate, hidden)),
        ("up_proj", (moe.experts, moe.intermediate, hidden)),
        ("down_proj", (moe.experts, hidden, moe.intermediate)),
    ):
        name = f"{prefix}mlp.experts.{projection}"
        specs.append(ParamSpec(name=name, shape=shape, role=ParamRole.EXPERTS, recipe=recipe, cut=own))
    return specs
