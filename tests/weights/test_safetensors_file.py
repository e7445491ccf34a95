"""The file reader agrees with the safetensors library, and names what is wrong with a damaged file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from trtllm_replayssm.builders.quantize_writer import Entry, SafetensorsWriter
from trtllm_replayssm.errors import CheckpointError, InvariantError
from trtllm_replayssm.weights.safetensors_file import NUMPY_TYPES, SafetensorsFile


def sample() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "bf16": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "f16": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "f32": rng.standard_normal(7).astype(np.float32),
        "fp8": rng.standard_normal((4, 3)).astype(ml_dtypes.float8_e4m3fn),
        "u8": rng.integers(0, 256, (3, 3), dtype=np.uint8),
        "i64": rng.integers(-9, 9, (2,)),
        "scalar": np.asarray(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


def raw_file(path: Path, header: Any, data: bytes, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def f32(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


def test_every_type_reads_back_as_the_library_wrote_it(tmp_path: Path) -> None:
    tensors = sample()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        got = file.tensors[name].array()
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes() and not got.flags.writeable


def test_arrays_are_views_of_one_mapping_and_outlive_the_file(tmp_path: Path) -> None:
    save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    first, second = file.tensors["a"].array(), file.tensors["a"].array()
    assert np.shares_memory(first, second)
    file.close()
    np.testing.assert_array_equal(first, np.arange(8))


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    data = b"\x07" + np.arange(3, dtype=np.float32).tobytes()
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": f32(1, 13, 3)}
    array = SafetensorsFile(raw_file(tmp_path / "x", header, data)).tensors["b"].array()
    np.testing.assert_array_equal(array, [0, 1, 2])
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": f32(0, 8, 2)}, b"\0" * 4),  # truncated
        ({"a": f32(0, 8, 2)}, b"\0" * 9),  # trailing bytes
        ({"a": f32(0, 8, 3)}, b"\0" * 8),  # shape against offsets
        ({"a": f32(4, 8, 1)}, b"\0" * 8),  # hole in front
        ({"a": f32(0, 4, 1), "b": f32(0, 4, 1)}, b"\0" * 4),  # overlap
        ({"a": f32(0, 4, 1), "b": f32(8, 12, 1)}, b"\0" * 12),  # hole inside
        ({"a": f32(-4, 0, 1)}, b"\0" * 4),
        ({"a": f32(0, 4, -1)}, b"\0" * 4),
        ({"a": {**f32(0, 4, 1), "dtype": "F4"}}, b"\0" * 4),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4),
        ({"a": 3}, b""),
        ([], b""),
        (b"{not json", b""),
        (b"\xff\xfe", b""),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, header: Any, data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"damaged\.safetensors: expected a complete .* got .*Download") as raised:
        SafetensorsFile(raw_file(tmp_path / "damaged.safetensors", header, data))
    assert str(raised.value.got), "the library's reason"


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\xff" * 8, b"\xff" * 8 + b"{}"])
def test_a_file_without_a_header_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"[hH]eader"):
        SafetensorsFile(tmp_path / "x")


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    save_file(sample(), tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "cut")


def test_the_writer_makes_the_librarys_bytes_order_independent(tmp_path: Path) -> None:
    tensors = {name: array for name, array in sample().items() if name != "empty"}
    types = {dtype: name for name, dtype in NUMPY_TYPES.items()}
    entries = [Entry(name, types[array.dtype], array.shape) for name, array in tensors.items()]
    for order in (list(tensors), list(reversed(tensors))):
        writer = SafetensorsWriter(tmp_path / "w", entries, {"format": "pt"})
        for name in order:
            writer.write(name, tensors[name])
        writer.close()
        file = SafetensorsFile(tmp_path / "w")
        for name, array in tensors.items():
            assert file.tensors[name].array().tobytes() == array.tobytes()
            assert np.shares_memory(file.tensors[name].array(), file.data())  # aligned, so not copied


def test_the_writer_refuses_what_it_did_not_declare(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "w", [Entry("a", "F32", (2,))], {})
    for name, array in (("b", np.zeros(2, np.float32)), ("a", np.zeros(3, np.float32))):
        with pytest.raises(InvariantError):
            writer.write(name, array)
    with pytest.raises(InvariantError, match="a"):
        SafetensorsWriter(tmp_path / "v", [Entry("a", "F32", (2,))], {}).close()
    writer.close(complete=False)
