"""Generate from the two bundled checkpoints by ReplaySSM decoding and compare with conventional decoding.

Plain and speculative, one and two state precisions. Needs a CPU only. Run: make demo
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtllm_replayssm import LLM, MTPDecodingConfig, NGramDecodingConfig, ReplayConfig, SamplingParams, StateFormat

EXAMPLES = Path(__file__).resolve().parent
PROMPTS = ["The history of the", "And the LORD said unto", "To install a package,", "A logger is an object that"]
MAX_TOKENS = 96
TWO_PRECISIONS = ReplayConfig(recurrence=StateFormat.FLOAT16, read=StateFormat.NVFP4)
EXPLANATION = """
text       greedy text of all prompts against the first row: identical, or tokens before the first difference (mean)
tok/s      of the reference operations on this CPU: that it runs, not how fast kernels are
tok/step   tokens a decode step commits: 1 when plain, the acceptance length when speculative
flushes    steps that folded the window of recent inputs (L = 16 tokens) into the recurrent state and wrote it
state MB   recurrent state and inputs that the decode steps must read and write, by the traffic model
saved      state MB of the first row over this row's"""

Drafter = MTPDecodingConfig | NGramDecodingConfig


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    state_cache: str = "replay"
    replay: ReplayConfig | None = None
    speculative: Drafter | None = None


@dataclass(frozen=True)
class Result:
    """Token ids by prompt, the first text, seconds, and the engine's counters of the run."""

    ids: list[list[int]]
    text: str
    seconds: float
    stats: dict[str, Any]


def settings(drafter: Drafter, name: str) -> list[Setting]:
    """Conventional decoding first: everything else is compared with it."""
    low = "NVFP4 reads, FP16 recurrence"
    return [
        Setting("conventional, plain", state_cache="conventional"),
        Setting(f"conventional, drafts by {name}", state_cache="conventional", speculative=drafter),
        Setting("replay, plain"),
        Setting(f"replay, drafts by {name}", speculative=drafter),
        Setting(f"replay, plain, {low}", replay=TWO_PRECISIONS),
        Setting(f"replay, drafts by {name}, {low}", replay=TWO_PRECISIONS, speculative=drafter),
    ]


def run(model: Path, setting: Setting) -> Result:
    """Greedy text for all prompts in one batch."""
    options = {"state_cache": setting.state_cache, "replay_config": setting.replay}
    with LLM(model, max_seq_len=512, speculative_config=setting.speculative, **options) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))  # read the weights before the clock starts
        started, before = time.perf_counter(), llm.stats()
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
        seconds, after = time.perf_counter() - started, llm.stats()
    counted = {key: after[key] - before[key] for key in after if isinstance(after[key], int)}
    completions = [output.outputs[0] for output in outputs]
    return Result([c.token_ids for c in completions], PROMPTS[0] + completions[0].text, seconds, counted)


def agreement(result: Result, baseline: Result) -> str:
    """Whether all texts equal the baseline's, else after how many tokens on average the first difference comes."""
    same = []
    for ours, theirs in zip(result.ids, baseline.ids, strict=True):
        differs = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
        same.append(differs[0] if differs else len(ours))
    return "identical" if min(same) == MAX_TOKENS else f"first {sum(same) / len(same):.0f} tokens"


def show(console: Console, model: Path, drafter: Drafter, name: str) -> None:
    """Run all settings on one checkpoint and print the text and the table."""
    table = Table(title=f"{model.name}: {len(PROMPTS)} prompts x {MAX_TOKENS} tokens, one batch")
    for column in ("state cache", "text", "tok/s", "tok/step", "flushes", "state MB", "saved"):
        table.add_column(column, justify="left" if column in ("state cache", "text") else "right")
    results = [(setting, run(model, setting)) for setting in settings(drafter, name)]
    baseline, speculative = results[0][1], results[3][1]
    for setting, result in results:
        stats, moved = result.stats, result.stats["state_bytes"]
        per_step = (stats["decode_rows"] + stats["accepted_tokens"]) / stats["decode_rows"]
        table.add_row(
            setting.name, agreement(result, baseline), f"{stats['output_tokens'] / result.seconds:.0f}",
            f"{per_step:.2f}", str(stats["flushes"]), f"{moved / 1e6:.1f}",
            f"{baseline.stats['state_bytes'] / moved:.2f}x",
        )  # fmt: skip
    console.print(f"\n{model.name}, replay with drafts, says:\n{speculative.text}\n", markup=False, highlight=False)
    console.print(table)


def main() -> None:
    """Both families."""
    console = Console(width=132)
    show(console, EXAMPLES / "qwen3_5-tiny-nvfp4", MTPDecodingConfig(max_draft_len=3), "its MTP head")
    show(console, EXAMPLES / "nemotron-tiny-nvfp4", NGramDecodingConfig(max_draft_len=3), "n-gram")
    console.print(EXPLANATION, highlight=False)
    console.print(f"\nPeak memory (RSS): {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
