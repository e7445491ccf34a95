"""Frozen settings of state pools and speculation. Composition, no inheritance; validated when made."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.checks import require_positive, require_type
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.launches import TunedLaunch, UpdateLaunch

MAX_WINDOW = 64
MAX_STEP_TOKENS = 16
RANK_TIMEOUT = 600  # seconds; every call, and every layer of a call that is not replayed, is progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How recurrent state is kept (paper, Sections 4-6).

    window: L, committed records before a flush.
    max_step_tokens: T_max, tokens of one step (the base token and its drafts); at most `window`.
    recurrence: format of the checkpoint that carries the recurrence.
    recurrence_rounding: rounding of that checkpoint; ignored for float32. Nearest and NVFP4 are for evaluation.
    read: format of a separate copy that serves outputs on non-flush steps (always rounded to nearest); None: shared.
    launches: how the kernels of some steps are launched; the library chooses for all others. They change the order of
    sums at most.
    """

    window: int = 16
    max_step_tokens: int = 1
    recurrence: StateFormat = StateFormat.FLOAT32
    recurrence_rounding: Rounding = Rounding.STOCHASTIC
    read: StateFormat | None = None
    launches: tuple[TunedLaunch, ...] = ()

    def __post_init__(self) -> None:
        require_positive("ReplayConfig", "window", self.window, most=MAX_WINDOW)
        require_positive("ReplayConfig", "max_step_tokens", self.max_step_tokens, most=MAX_STEP_TOKENS)
        # Both enumerations are strings as well: a plain string would compare equal and then fail far from here.
        require_type("ReplayConfig", "recurrence", self.recurrence, StateFormat)
        require_type("ReplayConfig", "recurrence_rounding", self.recurrence_rounding, Rounding)
        require_type("ReplayConfig", "read", self.read, StateFormat, type(None))
        require_type("ReplayConfig", "launches", self.launches, tuple)
        for tuned in self.launches:
            require_type("ReplayConfig", "launches", tuned, TunedLaunch)
        if self.max_step_tokens > self.window:
            raise ConfigError(
                "ReplayConfig",
                "max_step_tokens",
                expected=f"max_step_tokens <= window (T_max <= L), here T_max <= {self.window}",
                got=f"T_max = {self.max_step_tokens} > L = {self.window}",
                hint="Draft fewer tokens or widen the window",
            )

    @property
    def ring_rows(self) -> int:
        """C = L + T_max: room for the committed records and one step behind them."""
        return self.window + self.max_step_tokens

    @property
    def rederives(self) -> bool:
        """Whether a GDN flush re-derives its corrections: every pool but the one with a single float32 checkpoint."""
        return self.read is not None or self.recurrence is not StateFormat.FLOAT32

    def launch(self, rows: int, tokens: int) -> UpdateLaunch | None:
        """The launch of steps of `rows` rows, padding counted, of `tokens` tokens; None: the library's choice."""
        return next((t.launch for t in self.launches if (t.rows, t.tokens) == (rows, tokens)), None)

    def conv_rows(self, conv_kernel: int) -> int:
        """Rows of a convolution window ring, K - 1 + T_max."""
        return conv_kernel - 1 + self.max_step_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Capacity of a session's memory.

    slots: sequences that can be resident; max_seq_len: positions of a slot's KV cache, prompt and output together.
    """

    slots: int
    max_seq_len: int
    activation: ActivationDtype = ActivationDtype.FLOAT32

    def __post_init__(self) -> None:
        for name in ("slots", "max_seq_len"):
            require_positive("PoolConfig", name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphConfig:
    """Batch sizes to record as CUDA graphs, by TensorRT-LLM's names. Nothing is recorded without a GPU.

    batch_sizes: exactly these, None: powers of two and multiples of 64 up to max_batch_size. max_batch_size: the
    largest that is recorded, None: every batch that the session can hold. enable_padding: a step of another size runs
    in the next larger one; False: only steps of exactly a recorded size do. Larger steps are launched one by one.
    """

    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int | None = None
    enable_padding: bool = True

    def __post_init__(self) -> None:
        require_type("CudaGraphConfig", "enable_padding", self.enable_padding, bool)
        if self.max_batch_size is not None:
            require_positive("CudaGraphConfig", "max_batch_size", self.max_batch_size)
        if self.batch_sizes is None:
            return
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        for size in self.batch_sizes:
            require_positive("CudaGraphConfig", "batch_sizes", size)
        if self.max_batch_size is not None and self.max_batch_size != max(self.batch_sizes, default=0):
            raise ConfigError(
                "CudaGraphConfig", "max_batch_size", expected="none beside batch_sizes, or their largest",
                got=self.max_batch_size,
            )  # fmt: skip


EVERY_BATCH = CudaGraphConfig()
