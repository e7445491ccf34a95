"""Generate from the two bundled checkpoints by ReplaySSM decoding and compare with conventional decoding.

Plain and speculative, one and two state precisions. Needs a CPU only. Run: make demo
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_replayssm import LLM, MTPDecodingConfig, NGramDecodingConfig, ReplayConfig, SamplingParams
from trtllm_replayssm.dtypes import StateFormat

EXAMPLES = Path(__file__).resolve().parent
PROMPTS = [
    "The history of the",
    "And the LORD said unto",
    "To install a package on a Debian system, you should",
    "A logger is an object that",
]
MAX_TOKENS = 96
TWO_PRECISIONS = ReplayConfig(recurrence=StateFormat.FLOAT16, read=StateFormat.NVFP4)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    state_cache: str = "replay"
    replay: ReplayConfig | None = None
    speculative: MTPDecodingConfig | NGramDecodingConfig | None = None


@dataclass(frozen=True)
class Result:
    """What a setting gave: token ids by prompt, first text, seconds and the engine's counters."""

    ids: list[list[int]]
    text: str
    seconds: float
    stats: dict[str, object]


def settings(drafter: MTPDecodingConfig | NGramDecodingConfig, drafter_name: str) -> list[Setting]:
    """Conventional decoding first: everything else is compared with it."""
    return [
        Setting("conventional", state_cache="conventional"),
        Setting("replay, plain"),
        Setting(f"replay, speculative ({drafter_name})", speculative=drafter),
        Setting("replay, plain, NVFP4 reads + float16 recurrence", replay=TWO_PRECISIONS),
        Setting("replay, speculative, NVFP4 reads + float16 recurrence", replay=TWO_PRECISIONS, speculative=drafter),
    ]


def run(model: Path, setting: Setting) -> Result:
    """Greedy text for all prompts in one batch."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(
        model,
        max_seq_len=512,
        replay_config=setting.replay,
        state_cache=setting.state_cache,
        speculative_config=setting.speculative,
    ) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))  # read the weights before the clock starts
        started, before = time.perf_counter(), llm.stats()
        outputs = llm.generate(PROMPTS, params)
        seconds, after = time.perf_counter() - started, llm.stats()
    counted = {key: after[key] - before[key] for key in after if isinstance(after[key], int)}
    counted["mean_acceptance_length"] = counted["output_tokens"] and (
        (counted["accepted_tokens"] + counted["decode_rows"]) / counted["decode_rows"]
    )
    completions = [output.outputs[0] for output in outputs]
    return Result([c.token_ids for c in completions], PROMPTS[0] + completions[0].text, seconds, counted)


def agreement(result: Result, baseline: Result) -> str:
    """Whether all texts equal the baseline's, else after how many tokens on average the first difference comes."""
    same = []
    for ours, theirs in zip(result.ids, baseline.ids, strict=True):
        differs = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
        same.append(differs[0] if differs else len(ours))
    return "identical" if min(same) == MAX_TOKENS else f"first {sum(same) / len(same):.0f} tokens"


def show(console: Console, model: Path, drafter: MTPDecodingConfig | NGramDecodingConfig, drafter_name: str) -> None:
    """Run all settings on one checkpoint and print the text and the table."""
    table = Table(
        title=f"{model.name}: {len(PROMPTS)} prompts x {MAX_TOKENS} greedy tokens, float32 activations, L = 16"
    )
    for column in ("state cache", "text", "tokens/s", "accepted", "flushes", "state MB", "conventional / this"):
        table.add_column(column, justify="left" if column in ("state cache", "text") else "right")
    baseline: Result | None = None
    for setting in settings(drafter, drafter_name):
        result = run(model, setting)
        baseline = baseline or result
        moved, conventional = result.stats["state_bytes"], baseline.stats["state_bytes"]
        table.add_row(
            setting.name,
            agreement(result, baseline),
            f"{result.stats['output_tokens'] / result.seconds:.0f}",
            f"{result.stats['mean_acceptance_length']:.2f}",
            str(result.stats["flushes"]),
            f"{moved / 1e6:.1f}",
            f"{conventional / moved:.2f}x",
        )
    assert baseline is not None
    console.print(f"\n[bold]{model.name}[/bold] says: {baseline.text!r}\n")
    console.print(table)


def main() -> None:
    """Both families."""
    console = Console(width=140)
    show(console, EXAMPLES / "qwen3_5-tiny-nvfp4", MTPDecodingConfig(max_draft_len=3), "its MTP head")
    show(console, EXAMPLES / "nemotron-tiny-nvfp4", NGramDecodingConfig(max_draft_len=3), "n-gram")
    console.print(
        "\nState MB: recurrent state and records moved by the decode steps, counted by the traffic model."
        "\nTokens/s are of the reference operations on this CPU: they show that it runs, not how fast kernels are."
    )
    console.print(f"Peak memory (RSS): {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
