"""Which batch sizes a session records: steps of other sizes are padded to the next one."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.config import CudaGraphConfig

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


def recorded_sizes(config: CudaGraphConfig | None, slots: int) -> RecordedSizes:
    """The batch sizes to record in a session of `slots` slots; None: nothing is recorded."""
    if config is None:
        return RecordedSizes()
    if config.batch_sizes is not None:
        sizes = tuple(sorted({min(size, slots) for size in config.batch_sizes}))
    else:
        sizes = batch_sizes(slots if config.max_batch_size is None else min(config.max_batch_size, slots))
    return RecordedSizes(sizes, config.enable_padding)


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Powers of two and multiples of 64 below `largest`, and itself: padding never doubles the rows."""
    powers = {1 << i for i in range(largest.bit_length())}
    return tuple(sorted({n for n in powers | set(range(_STRIDE, largest, _STRIDE)) if n < largest} | {largest}))
