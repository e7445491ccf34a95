"""Whether two builds of the native library hold the same kernels, instruction for instruction.

A refactoring of device code that is to change nothing on a GPU is proved so by this, without one:
    python -m tests.tools.machine_code BEFORE/libreplayssm.so AFTER/libreplayssm.so
`make native-same BASE=<commit>` builds both and compares. Of each kernel count instructions, relocations, registers,
stack, shared memory, constant banks and parameters; its name does not, so templates may be renamed. Printed are renamed
kernels and every one without its equal; where there is one, the exit status is 1.

Kernels are taken out by `cuobjdump`: $CUOBJDUMP, or the one on the PATH (of a toolkit, or the wheel
nvidia-cuda-cuobjdump).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYMTAB, NOBITS = 2, 8  # section types of ELF
RELOCATIONS = {4: "<QQq", 9: "<QQ"}  # with and without addend
# Attributes of .nv.info sections.
PARAM_CBANK = 0x0A  # begins with the number of a symbol, which depends on the module's other kernels
REGISTERS = 0x2F
OF_A_SYMBOL = (0x11, 0x12, 0x23, REGISTERS)  # of the module's section: frame, least stack, most stack, registers


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    link: int
    size: int
    data: bytes


@dataclass(frozen=True)
class Kernel:
    """A kernel, or data that the kernels of a module share.

    Args:
        name: mangled, as in the module.
        size: of its instructions, bytes.
        registers: of a thread.
        digest: of everything compared.
    """

    name: str
    size: int
    registers: int
    digest: str


def text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def sections(module: bytes) -> list[Section]:
    """Of a 64-bit little-endian ELF file. Raises ValueError for anything else."""
    if module[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"machine_code: module: expected a 64-bit ELF file, got one that begins with {module[:6]!r}")
    (start,) = struct.unpack_from("<Q", module, 0x28)
    step, count, names = struct.unpack_from("<HHH", module, 0x3A)
    rows = [struct.unpack_from("<IIQQQQI", module, start + step * i) for i in range(count)]
    table = module[rows[names][4] : rows[names][4] + rows[names][5]]
    found = []
    for name, kind, _, _, offset, size, link in rows:
        data = b"" if kind == NOBITS else module[offset : offset + size]
        found.append(Section(text(table, name), kind, link, size, data))
    return found


def symbols(found: list[Section]) -> list[str]:
    """Names by number."""
    for section in found:
        if section.kind == SYMTAB:
            table = found[section.link].data
            return [text(table, name) for (name,) in struct.iter_unpack("<I20x", section.data)]
    return []


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Of a .nv.info section: (attribute, value). Small values stand where larger ones have their length."""
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        value = info[at + 4 : at + 4 + length] if form == 4 else info[at + 2 : at + 4]
        at += 4 + (length if form == 4 else 0)
        yield attribute, value


def numbers(found: list[Section], names: list[str]) -> dict[str, dict[int, int]]:
    """Registers and stack of each kernel, which stand in the module's own .nv.info."""
    result: dict[str, dict[int, int]] = defaultdict(dict)
    for section in found:
        if section.name == ".nv.info":
            for attribute, value in attributes(section.data):
                if attribute in OF_A_SYMBOL:
                    symbol, number = struct.unpack("<II", value)
                    result[names[symbol]][attribute] = number
    return result


def content(section: Section, kernel: str, names: list[str]) -> object:
    """What of a kernel's section counts: no name of the kernel, no number that depends on the module's others."""
    if section.name.startswith(".nv.info."):
        return [(a, v[4:] if a == PARAM_CBANK else v) for a, v in attributes(section.data)]
    if section.kind in RELOCATIONS:
        rows = struct.iter_unpack(RELOCATIONS[section.kind], section.data)
        return [(at, info & 0xFFFFFFFF, names[info >> 32].replace(kernel, ""), *rest) for at, info, *rest in rows]
    return section.data


def kernels(module: bytes, architecture: str = "") -> list[Kernel]:
    """The kernels of a module, and its shared data where it has some."""
    found = sections(module)
    names = symbols(found)
    known = numbers(found, names)
    result = []
    for code in found:
        if code.name.startswith(".text."):
            name = code.name.removeprefix(".text.")
            parts: list[object] = [architecture, sorted(known[name].items())]
            for section in found:
                if section.name.endswith("." + name):
                    parts.append((section.name.removesuffix(name), section.size, content(section, name, names)))
            registers = known[name].get(REGISTERS, 0)
            result.append(Kernel(name, code.size, registers, hashlib.sha256(repr(parts).encode()).hexdigest()))
    for data in found:
        shared = data.name.startswith((".nv.global", ".nv.constant"))
        if shared and not any(data.name.endswith("." + kernel.name) for kernel in result):
            digest = hashlib.sha256(repr((architecture, data.name, data.size, data.data)).encode()).hexdigest()
            result.append(Kernel(data.name, data.size, 0, digest))
    return result


def library_kernels(library: Path) -> list[Kernel]:
    """All kernels of a library. Raises OSError where there is no cuobjdump, CalledProcessError where it fails."""
    tool = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if tool is None:
        raise OSError("machine_code: cuobjdump: expected one on the PATH or in $CUOBJDUMP, got none. "
                      "pip install nvidia-cuda-cuobjdump")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "-xelf", "all", str(library.resolve())], cwd=folder, check=True, capture_output=True)
        modules = sorted(Path(folder).iterdir())
        return [kernel for path in modules for kernel in kernels(path.read_bytes(), path.suffixes[-2])]


def readable(names: list[str]) -> list[str]:
    """Names as in the source, where c++filt is at hand."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool, "-p"], input="\n".join(names), text=True, capture_output=True, check=True)
    return done.stdout.splitlines()


def pair(before: list[Kernel], after: list[Kernel]) -> tuple[list[tuple[str, str]], list[Kernel], list[Kernel]]:
    """Equal kernels as pairs of names, those of one name first; then what of each side has no equal."""
    waiting: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in after:
        waiting[kernel.digest].append(kernel)
    pairs, rest = [], []
    for kernel in before:
        same = next((other for other in waiting[kernel.digest] if other.name == kernel.name), None)
        if same is None:
            rest.append(kernel)
            continue
        waiting[kernel.digest].remove(same)
        pairs.append((kernel.name, same.name))
    lost = []
    for kernel in rest:
        if waiting[kernel.digest]:
            pairs.append((kernel.name, waiting[kernel.digest].pop(0).name))
        else:
            lost.append(kernel)
    return pairs, lost, [kernel for left in waiting.values() for kernel in left]


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    before, after = (library_kernels(Path(argument)) for argument in arguments)
    pairs, lost, new = pair(before, after)
    for old, name in zip(readable([old for old, _ in pairs]), readable([name for _, name in pairs]), strict=True):
        if old != name:
            print(f"renamed: {old} -> {name}")
    for word, rest in (("only before", lost), ("only after", new)):
        for kernel, name in zip(rest, readable([kernel.name for kernel in rest]), strict=True):
            print(f"{word}: {name}: {kernel.size} bytes, {kernel.registers} registers")
    print(f"{len(pairs)} kernels equal, {len(lost)} only before, {len(new)} only after")
    return 1 if lost or new or not pairs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
