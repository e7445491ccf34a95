"""`trtllm-replayssm plan`: presets and checkpoints, the table, JSON, and the refusal with numbers."""

from __future__ import annotations

import json

import pytest

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.cli import main


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_preset_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("nemotron-3-nano-4b", "--gpu-memory", "139", "--draft-len", "3", "--max-seq-len", "1024", "--json")
    replay, conventional = (
        json.loads(plan(capsys, *common, "--state-cache", cache)[1]) for cache in ("replay", "conventional")
    )
    assert replay["slots"] > 3 * conventional["slots"]
    assert replay["bytes"]["slot: checkpoint"] == 21 * 96 * 80 * 128 * 4
    assert conventional["bytes"]["slot: snapshots"] == 4 * replay["bytes"]["slot: checkpoint"]
    assert replay["bytes"]["weights"] == conventional["bytes"]["weights"] > 7 << 30


def test_prompts_in_chunks_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts, few = (
        json.loads(plan(capsys, "nemotron-3-nano-4b", "--gpu-memory", "139", "--json", *more)[1])["bytes"]
        for more in ([], ["--prefill-chunk", "512"], ["--prefill-chunk", "512", "--max-batch-size", "2"])
    )
    state = 23 * 96 * 80 * 128 * 4
    assert [found["states of prompts in progress"] for found in (whole, parts, few)] == [state, 4 * state, 4 * state]
    assert "--prefill-chunk" in plan(capsys, "nemotron-3-nano-4b", "--gpu-memory", "9", "--prefill-chunk", "0")[2]


def test_a_prefix_cache_and_many_drafts_take_more_of_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    plain, reuse, drafts, asked = (
        json.loads(plan(capsys, "nemotron-3-nano-4b", "--gpu-memory", "139", "--json", *more)[1])["bytes"]
        for more in (
            [], ["--enable-block-reuse"], ["--draft-len", "15"], ["--draft-len", "15", "--max-num-tokens", "2048"]
        )
    )  # fmt: skip
    state = plain["states of prompts in progress"]
    assert reuse["states of prompts in progress"] == 16 * state
    assert drafts["a pass over prompts"] > asked["a pass over prompts"] == plain["a pass over prompts"]


@pytest.mark.parametrize(("model", "memory", "chunk"), [("qwen3.5-4b", "24", "16"), ("qwen3.5-4b", "80", "1")])
def test_the_slots_that_are_printed_are_taken_and_one_more_is_not(
    model: str, memory: str, chunk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where chunks are small every slot may have a prompt in progress."""
    common = (model, "--gpu-memory", memory, "--prefill-chunk", chunk)
    slots = json.loads(plan(capsys, *common, "--json", "--max-num-tokens", "2048")[1])["slots"]
    asked = [
        plan(capsys, *common, "--max-num-tokens", "2048", "--max-batch-size", str(n))[0] for n in (slots, slots + 1)
    ]
    assert slots > 0 and asked == [0, 1]


def test_a_checkpoint_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, str(CHECKPOINTS / "qwen-moe"), "--gpu-memory", "2", "--max-batch-size", "4")
    assert code == 0 and err == ""
    assert "slots" in out.splitlines()[-1] and "weights" in out


def test_more_than_fits_is_refused_in_one_line_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, "qwen3.5-4b", "--gpu-memory", "16", "--max-batch-size", "4096")
    assert code == 1 and err.count("\n") == 1
    slots = int(out.splitlines()[-1].split()[-1].replace(",", ""))
    assert f"at most {slots} slots" in err and "4096" in err


def test_a_share_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "free_gpu_memory_fraction" in plan(capsys, "qwen3.5-4b", "--free-gpu-memory-fraction", "2")[2]


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf", "1e305"])
def test_memory_that_cannot_be_is_refused(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "qwen3.5-4b", f"--gpu-memory={memory}")[2].startswith("trtllm-replayssm: plan: --gpu-memory: ")


def test_without_a_gpu_the_memory_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = plan(capsys, "qwen3.5-4b")
    assert code == 1 and out == ""
    assert err.startswith("trtllm-replayssm: plan: --gpu-memory: ") and err.endswith("--gpu-memory GIB\n")


def test_a_model_that_is_nowhere_may_be_a_directory_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no directory of this name exists" in plan(capsys, "checkpoints/none", "--gpu-memory", "2")[2]


def test_no_memory_left_is_not_a_negative_share(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "qwen3.5-4b", "--gpu-memory", "2")
    assert code == 0 and " -" not in out and out.splitlines()[-1].split() == ["slots", "0"]
