"""Result files: what was evaluated, with what, and the rows. One JSON object a file, readable without this package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation.forcing import Model
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.whole_file import whole_file

KINDS = ("kl", "decays", "drift", "tasks", "windows", "skip")


def describe_run(model: Model, streams: Sequence[Stream], prompt: int) -> dict[str, Any]:
    """What two runs must share to be one evaluation: checkpoint, tokens, types, kind of device."""
    geometry = model.checkpoint.geometry
    return {
        "checkpoint": Path(model.checkpoint.directory).name,
        "model": geometry.name,
        "family": geometry.family.value,
        "heads": [len(geometry.ssm_layers), geometry.ssm.heads],
        "prompt": prompt,
        "rows": [{"text": s.text, "seed": s.seed, "digest": s.digest} for s in streams],
        "activation": model.activation.value,
        "device": model.device.type,
    }


def write_results(path: Path, kind: str, meta: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the file, whole or not at all; one row a line, so that differences read well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"what": {json.dumps(kind)},\n "meta": {json.dumps(meta)},\n "rows": [\n{lines}\n]}}\n'
    with whole_file(path) as file:
        file.write(text.encode())


def read_results(path: Path, *kinds: str) -> dict[str, Any]:
    """A result file of one of these kinds, of any when none is named. Raises ConfigError when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError("eval", str(path), expected="a result file", got=f"no JSON ({error})") from error
    wanted = kinds or KINDS
    if not isinstance(data, dict) or data.get("what") not in wanted:
        raise ConfigError("eval", str(path), expected=f"a result file of kind {', '.join(wanted)}", got="another file")
    return data
