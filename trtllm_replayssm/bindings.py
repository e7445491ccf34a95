"""Names, types and symbolic sizes of what an engine reads and writes, and the program that a session runs.

The builder makes engines through this file and a session binds them through it, so that a name or a size is written
once. Symbols of sizes: B rows of the step, T tokens of a row, K tokens whose logits are wanted, S slots, C prompts in
progress, R the phase (1: decode or verify step, 2: prompt chunk; the extent itself tells a host without reading the
device).
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import FP4_BLOCK, FP8_BLOCK, StateFormat, num_blocks
from trtllm_replayssm.shapes import ModelGeometry, SsmKind, SsmShape

IDS = "ids"  # [B, T] int32 token ids; 0 where a row has no such token
POSITION = "position"  # [B] int32 absolute position of a row's first token
POSITIONS = "positions"  # [B, T] int32 absolute position of every token, whether it exists or not
TOKEN_INDEX = "token_index"  # [B, K] int32 tokens of the row whose logits are wanted
HIDDEN_IN = "hidden_in"  # [B, T, hidden] final hidden states, input of the MTP network
SLOT = "slot"  # [B] int32; -1 is a padding row
NUM_TOKENS = "num_tokens"  # [B] int32 tokens of the row that exist
ROW_FLAGS = "row_flags"  # [B] int32 RSSM_PREFILL_*: where a prompt chunk's state comes from and goes to
CARRY_INDEX = "carry_index"  # [B] int32 row of `carry` of a prompt in progress
PHASE = "phase"  # [R] int32, only its extent is read
LOGITS = "logits"  # [B, K, vocab] float32
HIDDEN = "hidden"  # [B, T, hidden] activation type, after the final norm
CURSORS = ("origin", "h", "cursor_position", "seed")  # [S], shared by all layers; seed int64, the others int32

ALIAS_SUFFIX = ".out"  # the output that is the same memory as the state tensor it is named after

Dim = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a program: dtype is a name of `dtypes` style ("float32", "bfloat16", "int32", "uint8", ...)."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Channels [start, start + width) of a tensor's last axis, read in place: strided, never copied."""

    tensor: str
    start: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Run an engine: its binding names to the program's tensors. KV outputs are the memory of their inputs."""

    engine: str
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStep:
    """Run a native operation over a layer's state.

    op: one of the constants below, `MOE` with its routing (input `logits`); inputs, outputs: its arguments; weights:
    argument to parameter name; layer: absolute index, or -1 for an operation without state.
    """

    op: str
    layer: int
    inputs: dict[str, View]
    outputs: dict[str, str]
    weights: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The steps of one network in order.

    tensors: everything that crosses a step, by name; outputs: `LOGITS` and `HIDDEN` to their tensors.
    """

    name: str
    tensors: dict[str, TensorSpec]
    outputs: dict[str, str]
    steps: tuple[EngineStep | OpStep, ...]


MAMBA2, GDN, CONV1D, MOE, ROUTE, COMMIT = (
    "Mamba2Replay", "GatedDeltaNetReplay", "CausalConv1dReplay", "MoeExperts", "MoeRoute", "ReplayCommit",
)  # fmt: skip
# Between the engines of tensor-parallel ranks, input `x`: its sum over the ranks; their last axes one after another.
RANK_SUM, RANK_JOIN = "RankSum", "RankJoin"


def layer_tensor(layer: int, part: str) -> str:
    """The name of one state tensor of one layer."""
    return f"layer.{layer}.{part}"


def step_inputs(geometry: ModelGeometry, activation: str) -> dict[str, TensorSpec]:
    """What a step is given beside state; a network takes those that it reads."""
    specs = [
        TensorSpec(name=IDS, dtype="int32", dims=("B", "T")),
        TensorSpec(name=POSITION, dtype="int32", dims=("B",)),
        TensorSpec(name=POSITIONS, dtype="int32", dims=("B", "T")),
        TensorSpec(name=TOKEN_INDEX, dtype="int32", dims=("B", "K")),
        TensorSpec(name=HIDDEN_IN, dtype=activation, dims=("B", "T", geometry.hidden)),
        TensorSpec(name=SLOT, dtype="int32", dims=("B",)),
        TensorSpec(name=NUM_TOKENS, dtype="int32", dims=("B",)),
        TensorSpec(name=ROW_FLAGS, dtype="int32", dims=("B",)),
        TensorSpec(name=CARRY_INDEX, dtype="int32", dims=("B",)),
        TensorSpec(name=PHASE, dtype="int32", dims=("R",)),
    ]
    return {spec.name: spec for spec in specs}


def cursor_tensors() -> list[TensorSpec]:
    """The per-slot registers."""
    return [TensorSpec(name=n, dtype="int64" if n == "seed" else "int32", dims=("S",)) for n in CURSORS]


def kv_tensors(geometry: ModelGeometry, layer: int, depth: int, activation: str) -> list[TensorSpec]:
    """Keys and values of one attention layer; row b of a step is row b of the cache, `depth` positions each."""
    dims: tuple[Dim, ...] = ("B", geometry.attention.kv_heads, depth, geometry.attention.head_dim)
    return [TensorSpec(name=layer_tensor(layer, p), dtype=activation, dims=dims) for p in ("keys", "values")]


def window_tensor(geometry: ModelGeometry, replay: ReplayConfig, layer: int, activation: str) -> TensorSpec:
    """The convolution window of one layer."""
    rows = replay.conv_rows(geometry.ssm.conv_kernel)
    name = layer_tensor(layer, "window")
    return TensorSpec(name=name, dtype=activation, dims=("S", rows, geometry.ssm.conv_channels))


def ssm_tensors(shape: SsmShape, replay: ReplayConfig, layer: int, activation: str) -> list[TensorSpec]:
    """Checkpoint copies and rings of one recurrent layer, in the order a plugin takes them; `carry` is the float32
    state of a prompt whose last chunk has not come.
    """
    H, G, P, N, C = shape.heads, shape.groups, shape.head_dim, shape.state_dim, replay.ring_rows
    gdn = shape.kind is SsmKind.GDN
    parts: list[tuple[str, str, tuple[Dim, ...]]] = [
        *_copy("checkpoint", replay.recurrence, shape),
        *(_copy("read", replay.read, shape) if replay.read is not None else ()),
        ("ring_value", "float16" if gdn else activation, (H, C, P)),
        ("ring_k", activation, (G, C, N)),
        ("ring_dt", "float32", (H, C)),
    ]
    if gdn:
        parts.append(("ring_key_factor", "float32", (G, C)))
        if replay.rederives:
            parts += [("ring_v", activation, (H, C, P)), ("ring_beta", "float32", (H, C))]
    parts.append(("carry", "float32", (H, P, N)))
    return [
        TensorSpec(name=layer_tensor(layer, part), dtype=dtype, dims=("C" if part == "carry" else "S", *dims))
        for part, dtype, dims in parts
    ]


def _copy(part: str, fmt: StateFormat, shape: SsmShape) -> list[tuple[str, str, tuple[Dim, ...]]]:
    """One copy of the state with its scales. NVFP4 packs two elements a byte."""
    H, P, N = shape.heads, shape.head_dim, shape.state_dim
    if fmt is StateFormat.FP8:
        blocks = num_blocks(N, FP8_BLOCK)
        return [(part, "float8_e4m3", (H, P, N)), (f"{part}_scale", "float32", (H, P, blocks))]
    if fmt is StateFormat.NVFP4:
        blocks = num_blocks(N, FP4_BLOCK)
        return [
            (part, "int8", (H, P, N // 2)), (f"{part}_scale", "float8_e4m3", (H, P, blocks)),
            (f"{part}_head_scale", "float32", (H,)),
        ]  # fmt: skip
    return [(part, fmt.value, (H, P, N))]
