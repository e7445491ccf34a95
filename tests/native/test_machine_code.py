"""The tool that compares the kernels of two builds sees what counts and nothing else. O0: modules made by hand."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import pytest

from tests.tools import machine_code
from tests.tools.machine_code import Kernel, pair


@dataclass(frozen=True)
class Made:
    """A kernel to put into a module."""

    name: str
    code: bytes = b"\x01\x02\x03\x04" * 4
    registers: int = 32
    parameters: int = 64
    shared: int = 0
    calls: str = ""  # a symbol its code refers to
    bank: bytes = b""  # of constants that the compiler put aside


def attribute(kind: int, *words: int) -> bytes:
    return struct.pack(f"<BBH{len(words)}I", 4, kind, 4 * len(words), *words)


def module(*made: Made, data: bytes = b"") -> bytes:
    """An ELF file as the compiler makes them, in what the tool reads."""
    names = ["", *(kernel.name for kernel in made), *(kernel.calls for kernel in made)]
    strings = b"".join(name.encode() + b"\0" for name in names)
    offsets = [sum(len(name) + 1 for name in names[:i]) for i in range(len(names))]
    listed: list[tuple[str, int, bytes, int]] = [("", 0, b"", 0), (".strtab", 3, strings, 0)]
    listed.append((".symtab", 2, b"".join(struct.pack("<I20x", offset) for offset in offsets), 1))
    info = b"".join(attribute(0x2F, i + 1, kernel.registers) for i, kernel in enumerate(made))
    listed.append((".nv.info", 0x70000000, info, 2))
    for i, kernel in enumerate(made):
        own = struct.pack("<BBBB", 3, 0x1B, 255, 0) + attribute(0x0A, i + 7, kernel.parameters)
        listed.append((f".nv.info.{kernel.name}", 0x70000000, own, 2))
        listed.append((f".text.{kernel.name}", 1, kernel.code, 2))
        listed.append((f".nv.constant0.{kernel.name}", 1, bytes(kernel.parameters), 2))
        listed.append((f".nv.shared.{kernel.name}", 8, bytes(kernel.shared), 2))
        if kernel.bank:
            listed.append((f".nv.constant2.{kernel.name}", 1, kernel.bank, 2))
        if kernel.calls:
            symbol = 1 + len(made) + i
            listed.append((f".rela.text.{kernel.name}", 4, struct.pack("<QQq", 0, symbol << 32 | 2, 0), 2))
    if data:
        listed.append((".nv.constant3", 1, data, 2))
    return elf(listed)


def elf(listed: list[tuple[str, int, bytes, int]]) -> bytes:
    """(name, type, content, link) of each section; the names' own section is added."""
    listed = [*listed, (".shstrtab", 3, b"", 0)]
    table = b"".join(name.encode() + b"\0" for name, *_ in listed)
    listed[-1] = (".shstrtab", 3, table, 0)
    body, headers, at = b"", b"", 64
    for i, (_, kind, content, link) in enumerate(listed):
        name = sum(len(other) + 1 for other, *_ in listed[:i])
        headers += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, len(content), link, 0, 1, 0)
        if kind != 8:
            body += content
            at += len(content)
    head = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64,
                                                             len(listed), len(listed) - 1)  # fmt: skip
    return head + body + headers


ONE, TWO = Made("one"), Made("two", code=b"\x09" * 32, registers=64)


def test_a_module_is_read_back() -> None:
    found = [(k.name, k.size, k.registers) for k in machine_code.kernels(module(ONE, TWO, data=b"shared"))]
    assert found == [("one", 16, 32), ("two", 32, 64), (".nv.constant3", 6, 0)]


def test_order_neighbours_and_names_do_not_count() -> None:
    calling = replace(TWO, calls="helper")
    after = [kernel for made in (replace(calling, name="other"), ONE) for kernel in machine_code.kernels(module(made))]
    pairs, lost, new = pair(machine_code.kernels(module(ONE, calling)), after)
    assert (sorted(pairs), lost, new) == ([("one", "one"), ("two", "other")], [], [])


@pytest.mark.parametrize(
    "change",
    [{"code": b"\x01\x02\x03\x05" * 4}, {"registers": 33}, {"parameters": 72}, {"shared": 16}, {"calls": "helper"},
     {"bank": b"\x01"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_everything_that_a_kernel_is_counts(change: dict[str, object]) -> None:
    changed = replace(ONE, **change)  # type: ignore[arg-type]
    pairs, lost, new = pair(machine_code.kernels(module(ONE, TWO)), machine_code.kernels(module(changed, TWO)))
    assert pairs == [("two", "two")]
    assert [k.name for k in lost] == [k.name for k in new] == ["one"]


def test_shared_data_and_the_architecture_count() -> None:
    made = [machine_code.kernels(module(ONE, data=data), name) for data, name in
            ((b"a", ".sm_90"), (b"b", ".sm_90"), (b"a", ".sm_90a"))]  # fmt: skip
    assert len(pair(made[0], made[1])[0]) == 1 and not pair(made[0], made[2])[0]


def test_of_equal_kernels_the_name_decides_and_each_counts_once() -> None:
    one, two = Kernel("one", 16, 32, "same"), Kernel("two", 16, 32, "same")
    assert pair([one, two], [two, one])[0] == [("one", "one"), ("two", "two")]
    assert pair([one, two], [two]) == ([("two", "two")], [one], [])


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a 64-bit ELF file"):
        machine_code.kernels(b"MZ" + bytes(100))
