"""Names of tensors in public checkpoints <-> the canonical names that the models list."""

from __future__ import annotations

from trtllm_replayssm.shapes import Family, ModelGeometry

_RENAMES = {
    Family.QWEN3_5: (("model.language_model.", "model."),),
    # `model.` is the in-memory prefix of transformers, embed_tokens the spelling of vLLM
    Family.NEMOTRON_H: (("model.", "backbone."), ("backbone.embed_tokens.", "backbone.embeddings.")),
}
_UNUSED_PREFIXES = ("model.visual.", "visual.", "backbone.visual.")
_UNUSED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".rotary_emb.inv_freq")


def canonical_name(name: str, family: Family) -> str:
    """The canonical name of the tensor `name`; a name of no known scheme comes back unchanged."""
    for old, new in _RENAMES[family]:
        if name.startswith(old):
            name = new + name[len(old) :]
    return name


def is_known_unused(canonical: str) -> bool:
    """Whether a tensor may be left alone: the vision tower, activation and cache scales, rotary tables."""
    return canonical.startswith(_UNUSED_PREFIXES) or canonical.endswith(_UNUSED_SUFFIXES)


def attention_prefix(geometry: ModelGeometry, layer: int) -> str:
    """The canonical prefix of an attention layer's projections; the MTP head's layers follow the main model's."""
    block = "mixer." if geometry.family is Family.NEMOTRON_H else "self_attn."
    main = len(geometry.layers)
    if layer >= main:
        return f"mtp.layers.{layer - main}.{block}"
    return f"{'backbone' if geometry.family is Family.NEMOTRON_H else 'model'}.layers.{layer}.{block}"


def split_expert_stack(name: str) -> tuple[str, str]:
    """`<block>.experts.<projection>` -> (`<block>.experts`, projection)."""
    prefix, _, projection = name.rpartition(".")
    return prefix, projection


def expert_weight(stack: str, expert: int) -> str:
    """The name of one expert's weight of the stack `<block>.experts.<projection>`."""
    prefix, projection = split_expert_stack(stack)
    return f"{prefix}.{expert}.{projection}.weight"
