"""The memory planner: how many slots a device holds beside the weights and the memory of a step. Pure arithmetic.

Nothing is allocated or asked of a device here. A slot belongs to one sequence for its whole life and holds
max_seq_len positions, so slots are what admission and preemption count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.shapes import LayerKind, ModelGeometry
from trtllm_replayssm.spec.traffic import SlotBytes, conventional_slot_bytes, slot_bytes

GIB = 1 << 30
MIB = 1 << 20
REUSED_PROMPTS = 16  # with a prefix cache in their middle at once: each has float32 states, 50 to 168 MB in the presets
STEP_TOKENS = 2048  # of one engine step, unless its rows and their drafts are more
LIBRARY_BYTES = GIB  # what CUDA, its libraries' workspaces and recorded graphs take beside tensors, rounded up


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What lies where, in bytes.

    memory: free on the device before anything is loaded. weights: all parameters. contexts: execution contexts of
    engines. prompt: the largest pass over prompt tokens. prompts: those in progress at once, but no more than slots;
    carry: the states of one. reserve: libraries and graphs. fraction: share of the rest that slots may take. slot: one
    slot by kind; row: what a step needs for each slot's row (activations and logits).
    """

    memory: int
    weights: int
    contexts: int
    prompt: int
    prompts: int
    carry: int
    reserve: int
    fraction: float
    slot: SlotBytes
    row: int

    def carries(self, slots: int) -> int:
        """Bytes of the states of prompts in progress beside so many slots."""
        return min(self.prompts, slots) * self.carry

    def room(self, slots: int) -> int:
        """Bytes that so many slots and their rows may take; negative when not even the weights fit."""
        rest = self.memory - self.weights - self.contexts - self.prompt - self.reserve - self.carries(slots)
        return int(rest * self.fraction)

    @property
    def slots(self) -> int:
        """Slots that fit."""
        each = self.slot.total + self.row
        many = max(self.room(self.prompts), 0) // each
        if many >= self.prompts:
            return many
        return max((n for n in range(self.prompts) if n * each <= self.room(n)), default=0)  # each with a prompt

    def need(self, slots: int) -> int:
        """Bytes that so many slots take with everything beside them but the libraries."""
        return self.weights + self.contexts + self.prompt + self.carries(slots) + slots * (self.slot.total + self.row)

    def require(self, slots: int) -> None:
        """Raise ConfigError, with every number, when so many slots do not fit."""
        if slots <= self.slots:
            return
        need = slots * (self.slot.total + self.row)
        engines = f"{self.contexts} of execution contexts, " if self.contexts else ""
        raise ConfigError(
            "LLM", "max_batch_size",
            expected=f"at most {self.slots} slots: {self.memory} bytes of free memory, less {self.weights} of weights, "
            f"{engines}{self.prompt} for a pass over prompts, {self.carry} for each prompt in progress (at most "
            f"{self.prompts}) and {self.reserve} in reserve, times {self.fraction:g}, hold {self.slots} of "
            f"{self.slot.total} + {self.row} bytes",
            got=f"{slots} (need {need} bytes)",
            hint="Lower max_batch_size, max_seq_len, max_num_tokens or the draft length, raise prefill_chunk or "
            "free_gpu_memory_fraction, or keep the recurrent state in a smaller format",
        )  # fmt: skip

    def table(self) -> list[tuple[str, int]]:
        """(what, bytes) for people to read, without kinds that take nothing."""
        kinds = ("checkpoint", "read_copy", "snapshots", "rings", "conv_windows", "kv", "cursors")
        rows = [
            ("free memory", self.memory), ("weights", self.weights), ("execution contexts", self.contexts),
            ("a pass over prompts", self.prompt), ("states of prompts in progress", self.carries(self.slots)),
            ("libraries and graphs", self.reserve),
            (f"for slots ({self.fraction:.0%})", max(0, self.room(self.slots))),
            *((f"slot: {kind.replace('_', ' ')}", getattr(self.slot, kind)) for kind in kinds),
            ("slot: its row of a step", self.row),
        ]  # fmt: skip
        return [(what, size) for what, size in rows if size]

    def lines(self) -> list[str]:
        """The table as text, and the number of slots."""
        text = [f"{what:28} {size / MIB:14,.2f} MiB" for what, size in self.table()]
        return [*text, f"{'slots':28} {self.slots:14,}"]


def plan_memory(
    geometry: ModelGeometry, replay: ReplayConfig, pool: PoolConfig, *, memory: int, weights: int,
    contexts: int = 0, conventional: bool = False, prompt_tokens: int = 2048, prompts: int = 1,
    fraction: float = 0.9, reserve: int = LIBRARY_BYTES, drawn_drafts: bool = False,
) -> MemoryPlan:  # fmt: skip
    """The plan of one replica; pool.slots is not used.

    memory: bytes free before the weights are loaded; weights: their bytes on the device; contexts: bytes of
    engines' execution contexts; prompt_tokens: of one pass; prompts: in progress at once, see `prompts_in_progress`.
    conventional: a pass over prompts also makes the states of one layer for each of its rows, finished or not.
    drawn_drafts: drafts are drawn on the device, whose distributions, and those they are held against, are float32.
    """
    itemsize = pool.activation.itemsize
    token = pass_bytes(geometry, itemsize)
    logits = geometry.vocab * (8 + itemsize)  # in the activation type, in float32, and kept outside recorded graphs
    state = 4 * geometry.ssm.state_elems if conventional and prompts else 0
    return MemoryPlan(
        memory=memory, weights=weights, contexts=contexts,
        prompt=prompt_tokens * token, prompts=prompts, carry=carry_bytes(geometry), reserve=reserve, fraction=fraction,
        slot=pool_slot_bytes(geometry, replay, pool, conventional=conventional),
        row=replay.max_step_tokens * (token + logits + (12 * geometry.vocab if drawn_drafts else 0)) + state,
    )  # fmt: skip


def step_tokens(rows: int, draft_len: int) -> int:
    """Tokens of one engine step where nobody asks for a number: all rows with their drafts, or prompts."""
    return max(STEP_TOKENS, rows * (1 + draft_len))


def prompts_in_progress(
    pass_tokens: int, chunk: int | None, slots: int | None = None, *, reuse: bool = False
) -> int:  # fmt: skip
    """Prompts that an engine has unfinished at once, at most; slots: there are no more than these.

    chunk: tokens of one prompt chunk, None: all of a pass of `pass_tokens`. The oldest prompts come first, so that of
    new ones no more begin than chunks fill a pass. Those that come back from the host, and with a prefix cache (reuse)
    those that begin at a snapshot or are cut for one, would be more: they wait for their turn.
    """
    most = -(-pass_tokens // (chunk or max(pass_tokens, 1)))
    if reuse and pass_tokens:
        most = max(most, REUSED_PROMPTS)
    return most if slots is None else min(most, slots)


def carry_bytes(geometry: ModelGeometry) -> int:
    """Float32 states of the recurrent layers, between the chunks of a prompt; those of two layers more while a pass
    moves them: of a prompt that ends in it, and of one that begins.
    """
    layers = len(geometry.ssm_layers)
    return (layers + 2) * 4 * geometry.ssm.state_elems if layers else 0


def pool_slot_bytes(
    geometry: ModelGeometry, replay: ReplayConfig, pool: PoolConfig, *, conventional: bool
) -> SlotBytes:
    """One slot as the session's pools hold it: T_max positions of keys and values beyond max_seq_len, for drafts; a
    conventional slot has T_max states beside its current one.
    """
    deep = replace(pool, max_seq_len=pool.max_seq_len + replay.max_step_tokens)
    slot = slot_bytes(geometry, replay, deep)
    if not conventional:
        return slot
    baseline = conventional_slot_bytes(geometry, replay.recurrence, replay.max_step_tokens, deep)
    return replace(
        baseline, snapshots=replay.max_step_tokens * baseline.checkpoint, conv_windows=slot.conv_windows,
        cursors=slot.cursors,
    )  # fmt: skip


def pass_bytes(geometry: ModelGeometry, itemsize: int) -> int:
    """Activations of one token while a layer runs, an upper bound: residual, normalised and two of the widest vectors.

    Half of them may be float32, whatever the activation type.
    """
    ssm, attention, moe = geometry.ssm, geometry.attention, geometry.moe
    widest = [2 * ssm.inner + ssm.conv_channels, 2 * attention.q_size + 2 * attention.kv_size]
    if LayerKind.MLP in geometry.layers or moe is None:
        widest.append(2 * geometry.mlp_intermediate)
    if moe is not None:
        width = geometry.hidden if moe.latent is None else moe.latent
        widest.append(moe.top_k * (2 * moe.intermediate + width) + 2 * moe.shared_intermediate)
    return (itemsize + 4) * (2 * geometry.hidden + max(widest))
