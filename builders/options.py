"""What a user chooses for a build, validated when made."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_replayssm.builders.flavour import CURRENT, FlavourName
from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

AS_STORED, DEQUANTISED, DENSE_NVFP4 = "checkpoint", "bf16", "dense-nvfp4"
WEIGHTS = (AS_STORED, DEQUANTISED, DENSE_NVFP4)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """flavour, target: see `flavour.load`. replay: window, tokens of a step, state formats.

    weights: "checkpoint" keeps every matrix as it is stored; "bf16" dequantises; "dense-nvfp4" quantises the dense
    linear layers that are stored unquantised. max_batch: rows of a step, which are also the slots of the pools.
    max_seq_len: positions of a slot. context_tokens: largest prompt chunk, of `context_rows` rows.
    tp_size: GPUs that share the model; tp_rank: the one of them whose engines are built.
    """

    flavour: FlavourName = FlavourName.RTX
    target: str = CURRENT
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    activation: ActivationDtype = ActivationDtype.BFLOAT16
    weights: str = AS_STORED
    max_batch: int = 8
    max_seq_len: int = 8192
    context_rows: int = 1
    context_tokens: int = 2048
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_seq_len", "context_rows", "context_tokens", "tp_size"):
            require_positive("build", name, getattr(self, name))
        if self.weights not in WEIGHTS:
            raise ConfigError("build", "weights", expected=f"one of {WEIGHTS}", got=repr(self.weights))
        if self.context_tokens > self.max_seq_len:
            raise ConfigError(
                "build", "context_tokens", expected=f"at most max_seq_len = {self.max_seq_len}", got=self.context_tokens
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError("build", "tp_rank", expected=f"0..{self.tp_size - 1}", got=self.tp_rank)

    @property
    def parallel(self) -> TensorParallel:
        """The rank that is built for."""
        return TensorParallel(self.tp_size, self.tp_rank)

    @property
    def depth(self) -> int:
        """Positions of a cache row: a step may write T_max beyond the last committed one."""
        return self.max_seq_len + self.replay.max_step_tokens
