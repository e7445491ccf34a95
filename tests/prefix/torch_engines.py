"""Engines over torch sessions of small checkpoints, with and without a prefix cache, and what they leave in a slot."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.paths import EXAMPLES
from tests.runtime.harness import Driver
from tests.session import sessions
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.prefix.cache import Entry
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig
from trtllm_replayssm.runtime.session.base import SlotSnapshot
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.runtime.speculative.drafter import Drafter
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter
from trtllm_replayssm.runtime.step import SessionHead
from trtllm_replayssm.weights.checkpoint import Checkpoint

WITH_HEAD = "qwen3_5-tiny-nvfp4"  # the bundled checkpoint that has a drafting head
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16-nvfp4": {"recurrence": StateFormat.FLOAT16, "read": StateFormat.NVFP4},
    "fp8": {"recurrence": StateFormat.FP8},
}
SAMPLED: dict[str, Any] = {"max_tokens": 20, "end_id": -1, "temperature": 0.9, "seed": 11}


@cache
def bundled() -> Checkpoint:
    return Checkpoint.open(EXAMPLES / WITH_HEAD)


@cache
def bundled_weights() -> TorchWeights:
    return TorchWeights(bundled(), sessions.torch_dtype(ActivationDtype.FLOAT32), sessions.CPU)


def session_of(name: str, *, slots: int, max_seq_len: int, formats: str, window: int = 8) -> TorchSession:
    if name != WITH_HEAD:
        options = FORMATS[formats]
        return sessions.open_session(name, window=window, slots=slots, max_seq_len=max_seq_len, **options)
    replay = ReplayConfig(window=window, max_step_tokens=4, **FORMATS[formats])
    pool = PoolConfig(slots=slots, max_seq_len=max_seq_len, activation=ActivationDtype.FLOAT32)
    pools = StatePools.allocate(bundled().geometry, replay, pool, conventional=False, device=sessions.CPU)
    return TorchSession(bundled_weights(), pools, debug=True)


class TorchBench(Driver):
    """An engine in debug mode over a torch session; block None: no prefix cache."""

    def __init__(
        self, name: str, kind: str = "plain", *, block: int | None = None, formats: str = "float32", slots: int = 2,
        outputs: bool = False, budget: int = 1 << 30, max_seq_len: int = 192, chunk: int | None = None,
    ) -> None:  # fmt: skip
        self.session = session_of(name, slots=slots, max_seq_len=max_seq_len, formats=formats)
        drafters: dict[str, Drafter | None] = {
            "plain": None,
            "ngram": NGramDrafter(3, 3),
            "mtp": MtpDrafter(SessionHead(self.session), 3),
            "mtp-sampled": MtpDrafter(SessionHead(self.session), 3, sample=True),
        }
        prefix = None if block is None else PrefixConfig(block=block, budget=budget, outputs=outputs)
        config = EngineConfig(
            max_batch_size=slots, max_num_tokens=256, prefill_chunk=chunk, prefix=prefix, debug=True
        )
        super().__init__(Engine(self.session, drafters[kind], None, config))

    def hashes(self, prompt: Sequence[int], **settings: Any) -> tuple[list[str], list[int]]:
        """Hash of the request's slot after its prompt and after each step from there on, and its tokens."""
        number, found = self.add(prompt, **settings), []
        while self.engine.has_work:
            self.step()
            for choice in self.engine._scheduler.resident:
                if choice.prefilled == len(prompt) and choice.slot is not None:
                    found.append(self.session.pools.slot_hash(choice.slot))
        return found, self.done[number].outputs[0].token_ids

    @property
    def entries(self) -> list[Entry]:
        assert self.engine.prefix is not None
        return sorted(self.engine.prefix.cache._entries.values(), key=lambda e: e.position)

    def key(self, tokens: Sequence[int]) -> bytes:
        """The cache's key of these tokens."""
        assert self.engine.prefix is not None
        return self.engine.prefix.cache.keys(list(tokens)).at(len(tokens))

    @property
    def hits(self) -> int:
        return self.engine.stats.prefix.hits


def digest(snapshot: SlotSnapshot) -> str:
    """Of every byte of a snapshot."""
    found = hashlib.sha256()
    for name, (kind, shape, data) in sorted(snapshot.arrays().items()):
        found.update(f"{name} {kind} {shape}".encode() + data)
    return found.hexdigest()


def prompt(name: str, length: int, start: int = 0) -> list[int]:
    """Token ids of a text that the checkpoint knows, from `start` on."""
    if name == WITH_HEAD:
        return [5 + (start * 31 + 17 * i + i * i % 13) % 200 for i in range(length)]
    ids = sessions.sequence(name)
    return [ids[(7 * (i + start)) % len(ids)] for i in range(length)]
