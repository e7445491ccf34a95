"""Where the parts of an engine bundle lie: the directory itself, or one folder a rank where GPUs share the model.

`rank0`, `rank1`, ... are bundles of one rank each: manifest, engines, weights, tokenizer. Ranks that were built one by
one become a whole bundle by moving their folders together.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.manifest import MANIFEST, Manifest, read_manifest, require_same

_FOLDER = re.compile(r"rank(0|[1-9]\d{0,8})", re.ASCII)


def rank_folder(rank: int) -> str:
    """The name of a rank's folder."""
    return f"rank{rank}"


def bundle_parts(directory: Path) -> tuple[Path, ...]:
    """The folders with a manifest, by rank: the directory itself for one GPU, none where it is no bundle."""
    if (directory / MANIFEST).is_file():
        return (directory,)
    found = {int(m[1]): path for path in directory.glob("rank*") if (m := _FOLDER.fullmatch(path.name)) is not None}
    return tuple(found[rank] for rank in sorted(found) if (found[rank] / MANIFEST).is_file())


def read_parts(directory: Path) -> list[tuple[Path, Manifest]]:
    """Every rank's folder and manifest, in order. The files that they name are not checked here.

    Raises EngineMismatchError where ranks are missing or were not built alike.
    """
    parts = [(path, read_manifest(path)) for path in bundle_parts(directory)]
    if not parts:
        raise EngineMismatchError("read bundle", str(directory), expected=f"a {MANIFEST}", got="none")
    first = parts[0][1]
    size, ranks = first.build.tp_size, [manifest.build.tp_rank for _, manifest in parts]
    if len(ranks) != size or ranks != list(range(size)):
        raise EngineMismatchError(
            "read bundle", "ranks", expected=f"engines of all {size} ranks, from {rank_folder(0)} on",
            got=f"those of {', '.join(map(str, ranks))}",
            hint="Build with --tp-rank all, or move the folders of the ranks into one directory",
        )  # fmt: skip
    for path, manifest in parts[1:]:
        require_same(f"read bundle: {path.name}", _shared(manifest), _shared(first))
    return parts


def _shared(manifest: Manifest) -> Manifest:
    """What must be equal on all ranks."""
    build = replace(manifest.build, tp_rank=0, peak_rss_bytes=0, seconds=0.0)
    return replace(manifest, build=build, programs={}, memory={}, files={})
