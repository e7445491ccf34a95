"""How many execution contexts a session over a bundle makes, and their device memory, from its manifest alone.

`TensorRtEngines` makes one for each engine and profile, and one for each engine of each recorded shape, all over one
scratch. Not counted: the code of kernels, which the driver loads, and what recorded graphs hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.bindings import EngineStep
from trtllm_replayssm.config import CudaGraphConfig
from trtllm_replayssm.manifest import GENERATION, MAIN, MTP, VERIFY, Manifest
from trtllm_replayssm.runtime.session.graph_sizes import recorded_sizes


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """recorded: contexts of recorded steps; kept_bytes: what each keeps, of all; scratch_bytes: what they share."""

    recorded: int
    kept_bytes: int
    scratch_bytes: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.kept_bytes + self.scratch_bytes


def context_memory(manifest: Manifest, slots: int, graphs: CudaGraphConfig | None) -> ContextMemory:
    """Of a session of so many slots; graphs: what it records, None: nothing."""
    steps = [
        step.engine
        for name in (MAIN, MTP) if name in manifest.programs
        for step in manifest.programs[name].steps if isinstance(step, EngineStep)
    ]  # fmt: skip
    sizes = len(recorded_sizes(graphs, slots).sizes)
    profiles = list(manifest.profiles)
    recorded = [name for name in (GENERATION, VERIFY) if name in profiles]  # of one token a row, and of T_max
    kept = sum(sum(memory.own) for engine, memory in manifest.memory.items() if engine in steps)
    owned = [manifest.memory[engine].own for engine in steps if engine in manifest.memory]
    for name in recorded:
        number = profiles.index(name)
        kept += sizes * sum(own[number] for own in owned if own)  # empty: the builder reported nothing
    return ContextMemory(
        recorded=sizes * len(recorded) * len(steps), kept_bytes=kept,
        scratch_bytes=max((size for memory in manifest.memory.values() for size in memory.shared), default=0),
    )  # fmt: skip
