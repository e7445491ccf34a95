"""The file: safetensors with one JSON document in its metadata. Written beside its place and renamed, never in part.

A checksum covers document and tensors: it finds accidents, and is no signature.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trtllm_replayssm.errors import CheckpointError, EngineMismatchError
from trtllm_replayssm.runtime.session.base import RawArray
from trtllm_replayssm.whole_file import whole_file

FORMAT = "trtllm-replayssm request"
VERSION = 2
_MAX_BYTES = (1 << 63) - 1  # of one array
# The format's names of element types -> torch's, and their bytes
_TYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "I64": ("int64", 8), "I32": ("int32", 4), "U8": ("uint8", 1),
}  # fmt: skip
_NAMES = {kind: name for name, (kind, _) in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class Container:
    """document: a JSON value, as yet unchecked. arrays: by name."""

    document: Any
    arrays: Mapping[str, RawArray]


def write(path: str | Path, document: Mapping[str, Any], arrays: Mapping[str, RawArray]) -> None:
    """Write a file that is whole or absent, whatever happens meanwhile. Raises OSError when it cannot be written."""
    text = json.dumps(document)
    metadata = {
        "format": FORMAT, "version": str(VERSION), "document": text, "checksum": _checksum(text, arrays),
    }  # fmt: skip
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (kind, shape, data) in arrays.items():
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with whole_file(Path(path), mode=0o600) as file:  # prompts are nobody else's to read
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, _, data in arrays.values():
            file.write(data)


def read(path: str | Path) -> Container:
    """The content of a file of `write`. Raises CheckpointError for a missing or damaged one, EngineMismatchError for
    one of another version.
    """
    try:
        if not Path(path).is_file() and Path(path).exists():  # opening a pipe would wait for a writer
            raise _damaged(path, "no regular file")
        with safe_open(path, framework="np") as handle:  # checks the header against the file's size
            metadata = handle.metadata() or {}
            slices = [(name, handle.get_slice(name)) for name in handle.offset_keys()]
            listed = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
        content = Path(path).read_bytes()
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    if metadata.get("format") != FORMAT:
        raise _damaged(path, f"format {metadata.get('format')!r}")
    if metadata.get("version") != str(VERSION):
        raise EngineMismatchError(
            "import_request", str(path), expected=f"version {VERSION}", got=metadata.get("version")
        )
    arrays: dict[str, RawArray] = {}
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    for name, dtype, shape in listed:
        if dtype not in _TYPES:
            raise _damaged(path, f"tensor {name} of type {dtype}")
        kind, itemsize = _TYPES[dtype]
        # An empty array may claim sizes whose strides overflow
        if math.prod(max(n, 1) for n in shape) * itemsize > _MAX_BYTES:
            raise _damaged(path, f"tensor {name} of sizes {list(shape)}")
        size = math.prod(shape) * itemsize
        arrays[name] = (kind, shape, content[begin : begin + size])
        begin += size
    arrays = {name: arrays[name] for name in header if name in arrays}  # as written: empty ones share an offset
    text = metadata.get("document", "")
    if metadata.get("checksum") != _checksum(text, arrays):
        raise _damaged(path, "another content than its checksum says")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no document ({error})") from error
    return Container(document, arrays)


def _checksum(document: str, arrays: Mapping[str, RawArray]) -> str:
    """SHA-256 over the document and each tensor's name, type, shape and elements."""
    digest = hashlib.sha256()
    for part in (document, *(f"{name} {kind} {list(shape)}" for name, (kind, shape, _) in arrays.items())):
        digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
    for _, _, data in arrays.values():
        digest.update(data)
    return digest.hexdigest()


def _damaged(path: str | Path, got: str) -> CheckpointError:
    return CheckpointError("import_request", str(path), expected=f"a whole file of format {FORMAT!r}", got=got)
