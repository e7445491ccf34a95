"""Requests in files through `LLM`, from any thread, beside what runs; and the documentation's example as it stands."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.runtime.fake_session import hash_model
from tests.runtime.harness import VOCAB, bench
from tests.server.harness import QWEN
from tests.server.scripted import slow
from trtllm_replayssm.errors import CheckpointError, ContractError, RequestError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling.params import SamplingParams

PARAMS = SamplingParams(max_tokens=60, temperature=0.9, seed=5, detokenize=False)


def slow_llm() -> LLM:
    return LLM.from_engine(bench(model=slow(hash_model(VOCAB), 0.002), eos_ids=(), max_seq_len=128).engine)


def test_a_request_goes_on_in_another_llm_with_the_same_tokens_and_here_too(tmp_path: Path) -> None:
    file = tmp_path / "request.safetensors"
    with slow_llm() as llm:
        handle = llm.generate_async([1, 2, 3], PARAMS, streaming=True)
        for output in handle:
            if output.outputs[0].length >= 5:
                break
        llm.export_request(handle, file)
        mine = handle.result(30)
        with pytest.raises(RequestError, match="has not ended"):
            llm.export_request(handle, file)
        with pytest.raises(CheckpointError):
            llm.import_request(tmp_path / "nothing")
        assert llm.generate([4], SamplingParams(max_tokens=2, detokenize=False)) is not None  # the engine goes on
    with slow_llm() as other:
        resumed = other.import_request(file, streaming=True)
        assert 5 <= len(resumed.outputs[0].token_ids) < 60
        lengths = [output.outputs[0].length for output in resumed]
        assert resumed.output.outputs[0].token_ids == mine.outputs[0].token_ids
    assert lengths == sorted(lengths) and len(lengths) > 2


def test_threads_import_and_export_while_others_generate(tmp_path: Path) -> None:
    found: list[object] = []
    with slow_llm() as llm:
        expected = llm.generate([1, 2, 3], PARAMS).outputs[0].token_ids  # type: ignore[union-attr]

        def move(number: int) -> None:
            file = tmp_path / f"{number}.safetensors"
            handle = llm.generate_async([1, 2, 3], PARAMS)
            llm.export_request(handle, file)
            handle.abort()
            found.append(llm.import_request(file).result(60).outputs[0].token_ids)

        threads = [threading.Thread(target=move, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [expected] * 4


def test_an_llm_that_has_ended_or_failed_answers_at_once(tmp_path: Path) -> None:
    llm = slow_llm()
    handle = llm.generate_async([1, 2, 3], PARAMS)
    llm.shutdown()
    with pytest.raises(ContractError, match="shut down"):
        llm.export_request(handle, tmp_path / "x")

    def broken(tokens: object) -> object:
        raise OSError("the device is gone")

    with LLM.from_engine(bench(model=broken).engine) as failed:  # type: ignore[arg-type]
        handle = failed.generate_async([1], PARAMS)
        with pytest.raises(OSError, match="gone"):
            handle.result(20)
        with pytest.raises(OSError, match="gone"):
            failed.import_request(tmp_path / "x")


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = (ROOT / "docs" / "prefix-cache.md").read_text().split("## Requests in files")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)  # where the file is written; the page's checkpoint is beside the page
    code = code.replace('"examples/', f'"{ROOT}/examples/')
    exec(compile(code, "prefix-cache.md", "exec"), {})
    with LLM(QWEN) as llm:
        whole = llm.generate("The history of the", SamplingParams(max_tokens=200, temperature=0.8, seed=7))
    assert capsys.readouterr().out.rstrip("\n") == whole.outputs[0].text.rstrip("\n")  # type: ignore[union-attr]
