"""Makes the small random checkpoints of tests/checkpoints with their references.

    python -m tests.tools.make_checkpoints [--only NAME] [--out DIRECTORY]

Needs transformers 5.17 and torch. References come from one-shot forwards in float32 of the saved weights: every greedy
token is the argmax of a full forward over all tokens before it, never of a step over a cache.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from tests.tools.loaded_parameters import check_loaded, file_tensors
from tests.tools.reference_models import VOCAB, makers, randomise, to_storage_types

VERSION = "5.17"  # other versions initialise, name or compute these models differently
PROMPT_LENGTHS = (5, 17, 40)
GREEDY_TOKENS = 24
TOP = 20
SPECIAL_TOKENS = 4  # prompts draw from the ids above padding, begin and end
# Chosen so that every greedy margin exceeds MIN_MARGIN, a hundred times what float32 loses in these models.
SEEDS = {"nemotron-dense": 1, "nemotron-moe": 11, "nemotron-moe-groups": 10, "qwen-dense": 11, "qwen-moe": 10}
MIN_MARGIN = 0.01
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"


def load(directory: Path) -> PreTrainedModel:
    """The saved model in float32 with the plain attention, its parameters proven equal to the file's."""
    if not transformers.__version__.startswith(VERSION):
        raise RuntimeError(f"make_checkpoints: transformers: expected {VERSION}.x, got {transformers.__version__}")
    config = AutoConfig.from_pretrained(directory)
    kind = getattr(transformers, config.architectures[0])
    model: PreTrainedModel = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    check_loaded(model, file_tensors(directory))
    return model


def last_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [vocab] float32 at the last of `ids`, by one forward over all of them without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()


def reference(model: PreTrainedModel, prompt: list[int]) -> dict[str, Any]:
    """top20 at the prompt's last position; greedy ids (no end of sequence) and each step's top-1 to top-2 margin."""
    values, ids = last_logits(model, prompt).topk(TOP)
    greedy: list[int] = []
    margins: list[float] = []
    for _ in range(GREEDY_TOKENS):
        best = last_logits(model, prompt + greedy).topk(2)
        greedy.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 6))
    top = {"ids": ids.tolist(), "logits": [round(v, 6) for v in values.tolist()]}
    return {"input_ids": prompt, "top20": top, "greedy": greedy, "margins": margins}


def publish_spelling(directory: Path) -> None:
    """Rewrite the dense Nemotron's config.json as public ones spell it: pattern string, bare Infinity."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    kinds = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)
    config["time_step_limit"] = [0.0, float("inf")]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make(name: str, directory: Path) -> None:
    """Write config.json, model.safetensors and reference.json of one checkpoint."""
    torch.manual_seed(SEEDS[name])
    model = makers()[name]().eval()
    randomise(model, SEEDS[name])
    to_storage_types(model)
    shutil.rmtree(directory, ignore_errors=True)
    # the base Qwen checkpoints store the experts of a layer packed, as this library holds them in memory
    model.save_pretrained(directory, save_original_format=not name.startswith("qwen"))
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "model.safetensors").chmod(0o644)
    if name == "nemotron-dense":
        publish_spelling(directory)
    loaded = load(directory)
    rng = torch.Generator().manual_seed(SEEDS[name])
    prompts = [torch.randint(SPECIAL_TOKENS, VOCAB - 8, (n,), generator=rng).tolist() for n in PROMPT_LENGTHS]
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 CPU, one-shot forwards"
    out = {"made_with": made_with, "prompts": [reference(loaded, prompt) for prompt in prompts]}
    text = json.dumps(out, indent=1)
    (directory / "reference.json").write_text(_one_line_lists(text) + "\n", encoding="utf-8")
    margins = [m for p in out["prompts"] for m in p["margins"]]
    if min(margins) < MIN_MARGIN:
        raise RuntimeError(f"make_checkpoints: {name}: expected margins of {MIN_MARGIN} or more, got {min(margins)}")
    print(f"{name}: {(directory / 'model.safetensors').stat().st_size} bytes, smallest margin {min(margins):.4f}")


def _one_line_lists(text: str) -> str:
    """JSON text with each list of numbers on one line, so that references can be read and compared."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text)


def main() -> None:
    """Parse the command line and make the checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(SEEDS), help="make one checkpoint (all when absent)")
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="parent directory of the checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [args.only] if args.only else sorted(SEEDS):
        make(name, args.out / name)


if __name__ == "__main__":
    main()
