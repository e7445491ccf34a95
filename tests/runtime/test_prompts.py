"""Prompts as token ids: any integers in the vocabulary, and nothing that would have to be cut or flattened to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.harness import VOCAB, PieceTokenizer, bench
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling.params import SamplingParams

BAD = [
    [1.5, 2.9], [1, 2.0], np.array([1.5, 2.9]), np.array([1.0]), torch.tensor([1.5, 2.9]), torch.tensor([1.0]),
    np.array([[1, 2], [3, 4]]), np.array([[1], [2]]), torch.tensor([[1], [2]]), torch.tensor([[1, 2]]), [[1], [2]],
    [2**70], [1, -(2**70)], [10**5000], [1, VOCAB], [-1], [True], np.array([True]), torch.tensor([True]), ["1"], [None],
    [b"1"],
]  # fmt: skip
NO_SEQUENCE = [5, 5.0, None, b"\x01\x02", bytearray(b"\x01"), {1: 2}, np.int64(3), np.array(3), torch.tensor(3)]


@pytest.mark.parametrize("prompt", BAD, ids=range(len(BAD)))
def test_ids_that_are_none_are_refused_by_name(prompt: Any) -> None:
    machine = bench()
    with pytest.raises(RequestError, match=f"prompt: expected token ids in 0..{VOCAB - 1}, got"):
        machine.add(prompt)
    assert not machine.engine.has_work


@pytest.mark.parametrize("prompt", NO_SEQUENCE, ids=range(len(NO_SEQUENCE)))
def test_a_prompt_that_is_no_sequence_is_refused_by_name(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt: expected text or a sequence of token ids, got"):
        bench().add(prompt)


@pytest.mark.parametrize("prompt", [*BAD, *NO_SEQUENCE], ids=range(len(BAD) + len(NO_SEQUENCE)))
def test_the_public_interface_refuses_them_too(prompt: Any) -> None:
    with LLM.from_engine(bench().engine) as llm:
        if isinstance(prompt, list) and isinstance(prompt[0], list):
            assert len(llm.generate(prompt)) == 2  # type: ignore[arg-type]  # two prompts
            return
        with pytest.raises(RequestError, match=r"prompt|inputs"):
            llm.generate(prompt)
        assert llm.generate([1, 2], SamplingParams(max_tokens=2, end_id=-1)).outputs[0].length == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "prompt",
    [(1, 2, 3), range(1, 4), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8), torch.tensor([1, 2, 3])],
    ids=range(5),
)
def test_integers_of_any_library_are_ids(prompt: Any) -> None:
    request = bench().engine.make_request(prompt, SamplingParams())
    assert request.prompt_ids == (1, 2, 3) and {type(i) for i in request.prompt_ids} == {int}
    with LLM.from_engine(bench().engine) as llm:
        named = llm.generate_async({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
        assert named.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": "ab"}, {"prompt": [1]}, {"prompt": "a", "prompt_token_ids": [1]}, {}, {"text": "a"}]
)
def test_a_dictionary_holds_one_prompt_under_its_name(prompt: Any) -> None:
    machine = bench(tokenizer=PieceTokenizer([b"a", b"b"]))
    with LLM.from_engine(machine.engine) as llm, pytest.raises(RequestError, match="inputs"):
        llm.generate_async(prompt)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "end_id"])
def test_other_ids_outside_the_vocabulary_are_refused_by_name(name: str) -> None:
    for token in (VOCAB, 2**70, 10**5000):
        value: Any = {"stop_token_ids": [token], "logit_bias": {token: 1.0}, "end_id": token}[name]
        settings: dict[str, Any] = {name: value}
        with pytest.raises(RequestError, match=f"{name}: expected token ids in"):
            bench(tokenizer=PieceTokenizer([b"a"])).add([1], **settings)
