"""Servers over an engine without a model: its answer is a script, and every letter is a token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.runtime.fake_session import Model
from tests.runtime.harness import Bench, PieceTokenizer
from tests.server.harness import PLAIN_TEMPLATE, service
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling.distribution import Logits
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer, load_tokenizer

# Ids 2 and 11 stand for end tokens; "é" and the euro sign are cut into bytes.
WORDS = [
    b"a", b"b", b"<end>", b"be", b"ta ", b"gam", b"ma", b" delta", b"\xe2", b"\x82", b"\xac", b"<stop>", b"c", b"d",
    b"\xc3", b"\xa9", b" ",
]  # fmt: skip
LETTERS = PieceTokenizer(WORDS + [b"#%d#" % i for i in range(len(WORDS), 64)], special=(2, 11))


def byte_backend() -> Backend:
    """A tokenizer of the `tokenizers` library that knows the 256 bytes and nothing else; every text has tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_tokenizer() -> Tokenizer:
    """The same as the product takes it."""
    return load_tokenizer(byte_backend())


@contextmanager
def serving(machine: Bench, **settings: Any) -> Iterator[Service]:
    """A service over a fake engine, with a template that joins the messages."""
    with LLM.from_engine(machine.engine) as llm:
        yield service(llm, ChatTemplate(PLAIN_TEMPLATE), **settings)


def slow(model: Model, seconds: float) -> Model:
    """The same model, taking its time at each position."""

    def logits(tokens: Sequence[int]) -> Logits:
        time.sleep(seconds)
        return model(tokens)

    return logits
