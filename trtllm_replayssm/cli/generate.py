"""`trtllm-replayssm generate`: text from a checkpoint, plain or speculative, in one or two state precisions."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.checks import read_text
from trtllm_replayssm.cli.options import (
    ACTIVATIONS,
    add_drafter_options,
    add_replay_options,
    replay_config,
    speculative_config,
)

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.llm import LLM, CompletionOutput, RequestOutput


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "generate",
        help="generate text from a checkpoint",
        description="Generate text with ReplaySSM decoding. Prompts come from --prompt, --prompt-file or stdin.",
    )
    parser.add_argument("model", help="checkpoint directory (config.json, *.safetensors, tokenizer.json)")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt, the whole file")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each prompt (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--stats", action="store_true", help="print speed, acceptance and state traffic on stderr")
    _add_sampling(parser)
    _add_engine(parser)
    add_drafter_options(parser)
    add_replay_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate and print."""
    from trtllm_replayssm.runtime.llm import LLM

    prompts = _prompts(arguments)
    params = _sampling_params(arguments)
    speculative = speculative_config(arguments)
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        max_batch_size=arguments.max_batch_size,
        max_seq_len=arguments.max_seq_len,
        speculative_config=speculative,
        replay_config=replay_config(arguments, 1 if speculative is None else 1 + speculative.draft_len),
        state_cache=arguments.state_cache,
    ) as llm:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        assert isinstance(outputs, list)
        stats = _stats(llm, outputs, seconds)
    if arguments.json:
        print(json.dumps({"requests": [_as_dict(output) for output in outputs], "stats": stats}, indent=2))
        return 0
    for output in outputs:
        for choice in output.outputs:
            print(f"{output.prompt}{choice.text}")
    if arguments.stats:
        sys.stderr.write("".join(f"{name}: {value}\n" for name, value in stats.items()))
    return 0


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (greedy unless temperature, top-k or top-p is given)")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--top-p", type=float)
    group.add_argument("--min-p", type=float)
    group.add_argument("--repetition-penalty", type=float)
    group.add_argument("--presence-penalty", type=float)
    group.add_argument("--frequency-penalty", type=float)
    group.add_argument("--seed", type=int, help="64-bit; the same seed gives the same text, drafted or not")
    group.add_argument("--n", type=int, default=1, help="choices for each prompt")
    group.add_argument("--stop", action="append", help="a string that ends the text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    group.add_argument("--logprobs", type=int, metavar="K", help="log-probabilities (0: of the drawn tokens only)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--state-cache", choices=["replay", "conventional"], default="replay",
        help="conventional: read and write every state at every token, for comparison",
    )  # fmt: skip
    group.add_argument("--dtype", choices=["auto", *ACTIVATIONS], default="auto", help="of activations")
    group.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    group.add_argument("--max-batch-size", type=int, help="sequences at once (default 8, or what a GPU holds)")
    group.add_argument("--max-seq-len", type=int, help="prompt and output tokens of one sequence")


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompt_file is not None:
        prompts.append(read_text("generate", "prompt_file", arguments.prompt_file))
    return prompts or [sys.stdin.read()]


def _sampling_params(arguments: argparse.Namespace) -> Any:
    from trtllm_replayssm.runtime.sampling.params import SamplingParams

    names = (
        "max_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed n stop "
        "ignore_eos logprobs"
    )
    return SamplingParams(**{name: getattr(arguments, name) for name in names.split()})


def _stats(llm: LLM, outputs: list[RequestOutput], seconds: float) -> dict[str, object]:
    tokens = sum(choice.length for output in outputs for choice in output.outputs)
    return {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1), **llm.stats()}


def _as_dict(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **_logprobs(choice),
            }
            for choice in output.outputs
        ],
    }


def _logprobs(choice: CompletionOutput) -> dict[str, object]:
    """Per token: the drawn one first, then the most likely ones that were asked for."""
    if choice.logprobs is None:
        return {}
    tokens = [[{"id": i, "logprob": e.logprob, "rank": e.rank} for i, e in entry.items()] for entry in choice.logprobs]
    return {"cumulative_logprob": choice.cumulative_logprob, "logprobs": tokens}
