"""Host memory of a build: its peak, and letting go of mapped checkpoint pages that are no longer needed."""

from __future__ import annotations

import mmap
import resource
import sys
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def release_mapped(arrays: Iterable[NDArray[Any]]) -> None:
    """Drop the pages of the files that the arrays are views of; a later read maps them again.

    Without it the resident size of a build would grow by every weight read, since a mapped page stays counted.
    """
    released = set()
    for array in arrays:
        mapping = mapping_of(array)
        if mapping is not None and id(mapping) not in released:
            released.add(id(mapping))
            mapping.madvise(mmap.MADV_DONTNEED)


def mapping_of(array: Any) -> mmap.mmap | None:
    """The mapping at the end of an array's chain of bases, None for memory of its own."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array
