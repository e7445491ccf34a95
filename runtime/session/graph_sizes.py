"""Which batch sizes a session records: steps of other sizes are padded to the next one."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.checks import require_positive, require_type
from trtllm_replayssm.errors import ConfigError

_STRIDE = 64


@dataclass(frozen=True, slots=True)
class RecordedSizes:
    """The batch sizes that a session records, ascending; padding: smaller steps run in them too."""

    sizes: tuple[int, ...] = ()
    padding: bool = True

    def place(self, rows: int) -> int | None:
        """The recorded size that a step of `rows` rows runs in; None: in none of them."""
        if not self.padding:
            return rows if rows in self.sizes else None
        return next((size for size in self.sizes if size >= rows), None)


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

    def recorded(self, slots: int) -> RecordedSizes:
        """The batch sizes to record in a session of `slots` slots."""
        if self.batch_sizes is not None:
            sizes = tuple(sorted({min(size, slots) for size in self.batch_sizes}))
        else:
            sizes = batch_sizes(slots if self.max_batch_size is None else min(self.max_batch_size, slots))
        return RecordedSizes(sizes, self.enable_padding)


EVERY_BATCH = CudaGraphConfig()


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Powers of two and multiples of 64 below `largest`, and itself: padding never doubles the rows."""
    powers = {1 << i for i in range(largest.bit_length())}
    return tuple(sorted({n for n in powers | set(range(_STRIDE, largest, _STRIDE)) if n < largest} | {largest}))
