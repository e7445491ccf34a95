"""Model geometry: every size of a hybrid model, defined once. No arithmetic on head counts elsewhere.

Letters: H value heads, G key heads (groups), P = d_v, N = d_k, K convolution width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtllm_replayssm.errors import ConfigError

L2_EPS = 1e-6  # under the root of the norm that GDN divides its keys and queries by (Qwen3.5)


class Family(str, Enum):
    """Model family, by the `model_type` of its config.json."""

    NEMOTRON_H = "nemotron_h"
    QWEN3_5 = "qwen3_5"


class SsmKind(str, Enum):
    """Recurrence of an SSM layer (paper, Eq. 1 and Eq. 2)."""

    MAMBA2 = "mamba2"
    GDN = "gdn"


class LayerKind(str, Enum):
    """What one layer's mixer is."""

    SSM = "ssm"
    ATTENTION = "attention"
    MLP = "mlp"
    MOE = "moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmShape:
    """Sizes of one SSM layer.

    heads: config keys mamba_num_heads / linear_num_value_heads; groups: n_groups / linear_num_key_heads;
    head_dim (P, d_v): mamba_head_dim / linear_value_head_dim; state_dim (N, d_k): ssm_state_size / linear_key_head_dim;
    conv_kernel (K): conv_kernel / linear_conv_kernel_dim; conv_bias: use_conv_bias. first_head: which of the model's
    heads is head 0 here (tensor parallelism): the random numbers of a head do not depend on the rank that holds it.
    """

    kind: SsmKind
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool
    first_head: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "groups", "head_dim", "state_dim", "conv_kernel"):
            if getattr(self, name) < 1:
                raise ConfigError("SsmShape", name, expected="a positive integer", got=getattr(self, name))
        if self.heads % self.groups:
            raise ConfigError("SsmShape", "heads", expected=f"a multiple of groups={self.groups}", got=self.heads)

    @property
    def heads_per_group(self) -> int:
        """Value heads that share one key head."""
        return self.heads // self.groups

    @property
    def inner(self) -> int:
        """H * P: channels of x / v and of the gate."""
        return self.heads * self.head_dim

    @property
    def key_channels(self) -> int:
        """G * N: channels of k (B) and of q (C)."""
        return self.groups * self.state_dim

    @property
    def conv_channels(self) -> int:
        """Channels through the causal convolution: x | B | C, or q | k | v."""
        return self.inner + 2 * self.key_channels

    @property
    def state_elems(self) -> int:
        """Elements of one sequence's state in one layer, H * P * N."""
        return self.heads * self.head_dim * self.state_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one attention layer. rotary_dim = 0 means no positional encoding (Nemotron-H)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    rope_theta: float = 1e4

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError("AttentionShape", name, expected="a positive integer", got=getattr(self, name))
        if self.heads % self.kv_heads:
            raise ConfigError(
                "AttentionShape", "heads", expected=f"a multiple of kv_heads={self.kv_heads}", got=self.heads
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                "AttentionShape", "rotary_dim", expected=f"an even number in 0..{self.head_dim}", got=self.rotary_dim
            )

    @property
    def q_size(self) -> int:
        """Hq * D."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Hkv * D."""
        return self.kv_heads * self.head_dim


class Router(str, Enum):
    """How router scores become weights."""

    SIGMOID_BIAS = "sigmoid_bias"  # Nemotron-H: each score by itself; a bias takes part in the choice alone
    SOFTMAX = "softmax"  # Qwen3.5: over all experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Sizes and routing rule of a mixture-of-experts layer.

    latent: moe_latent_size, or None when experts read the full width. gated: SwiGLU experts (gate, up, down)
    instead of up/down with relu2. shared_gated: the shared expert's output is scaled by sigmoid(shared_expert_gate u).
    """

    experts: int
    top_k: int
    intermediate: int
    latent: int | None
    shared_intermediate: int
    gated: bool
    shared_gated: bool
    router: Router
    n_group: int = 1
    topk_group: int = 1
    norm_topk: bool = True
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError("MoeShape", "top_k", expected=f"1..experts={self.experts}", got=self.top_k)
        if self.experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(
                "MoeShape",
                "n_group/topk_group",
                expected=f"n_group dividing experts={self.experts} and 1 <= topk_group <= n_group",
                got=(self.n_group, self.topk_group),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """Everything that fixes a model's shapes and equations; parsed from config.json (`weights.hf_config`).

    layers: mixer kind by absolute layer index. For Qwen3.5 each layer also has a feed-forward part, which is the
    MoE when `moe` is set and a SwiGLU MLP of `mlp_intermediate` otherwise.
    mtp_pattern: mixer kinds of the multi-token-prediction head, empty when there is none.
    state_dtype: mamba_ssm_cache_dtype / mamba_ssm_dtype, float32 when the key is absent.
    """

    family: Family
    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerKind, ...]
    ssm: SsmShape
    attention: AttentionShape
    mlp_intermediate: int
    moe: MoeShape | None
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    state_dtype: str = "float32"
    mtp_pattern: tuple[LayerKind, ...] = ()

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Absolute indices of the layers of one kind, the MTP head's not included."""
        return tuple(i for i, k in enumerate(self.layers) if k is kind)

    @property
    def ssm_layers(self) -> tuple[int, ...]:
        """Absolute indices of the SSM layers."""
        return self.layers_of(LayerKind.SSM)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Absolute indices of all layers that hold keys and values; the MTP head's come after the main model's."""
        first_mtp = len(self.layers)
        mtp = tuple(first_mtp + i for i, k in enumerate(self.mtp_pattern) if k is LayerKind.ATTENTION)
        return self.layers_of(LayerKind.ATTENTION) + mtp
