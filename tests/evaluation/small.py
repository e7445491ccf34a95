"""A small random checkpoint and streams of random tokens for the tests of the evaluation."""

from __future__ import annotations

from functools import cache

import numpy as np

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.evaluation.forcing import Model
from trtllm_replayssm.runtime.evaluation.reference import Plan
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.weights.checkpoint import Checkpoint

PROMPT = 4


@cache
def small_model(name: str) -> Model:
    return Model.load(Checkpoint.open(CHECKPOINTS / name), activation=ActivationDtype.FLOAT32)


def random_streams(model: Model, rows: int, tokens: int) -> tuple[Stream, ...]:
    """Row i begins alike whatever the number of tokens."""
    vocab = model.checkpoint.geometry.vocab
    return tuple(
        Stream(text=f"t{i}", seed=i + 1, ids=tuple(ids[:tokens]), digest=str(i))
        for i, ids in ((i, np.random.default_rng(i).integers(0, vocab, 256).tolist()) for i in range(rows))
    )


def small_plan(model: Model, *lengths: int, rows: int = 2, reference_step: int = 1) -> Plan:
    streams = random_streams(model, rows, PROMPT + max(lengths) + 1)
    return Plan(streams=streams, prompt=PROMPT, lengths=lengths, reference_step=reference_step)


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""
