#!/usr/bin/env python3
"""Reads the machine code of the kernels out of an object or library that nvcc built, and fails where it is not what the
kernels were written to be. Needs no disassembler: opcodes alone are counted.

usage: sass.py LIBRARY [--json FILE] [--compare RECORD]

Of each sm_90 and sm_90a kernel it prints registers, instructions, a digest of the code and how often the opcodes that
matter occur; of the other architectures it prints what is wrong.
With --compare it also says whether this is the code that a record in results/h200 measured.
"""

import argparse
import ctypes
import ctypes.util
import hashlib
import json
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The low 9 bits of an instruction; the 3 above them say which kinds of operands it has. As nvdisasm names them.
OPCODES = {
    0x1F0: "HGMMA",  # wgmma
    0x03C: "HMMA",  # mma of a warp
    0x1B4: "UTMALDG",  # TMA, tensor to shared memory
    0x1B5: "UTMASTG",  # and back
    0x1BA: "UBLKCP",  # bulk copy
    0x03B: "LDSM",
    0x1AE: "LDGSTS",  # cp.async
    0x044: "STSM",
    0x1A7: "SYNCS",  # mbarrier: arrive, try_wait
    0x1B2: "SYNCS",  # init
    0x108: "MUFU",
    0x183: "LDL",
    0x187: "STL",
}
FORBIDDEN = ("LDL", "STL")  # local memory: spills, or arrays that did not become registers
# By the beginning of a kernel's name: what it is built around.
REQUIRED = {
    "forward_kernel": ("HGMMA", "UTMALDG", "UTMASTG"),
    "prepare_kernel": ("HGMMA", "HMMA"),
    "states_kernel": ("HGMMA", "UTMALDG"),
    "backward_chain_kernel": ("HGMMA", "UTMALDG", "UTMASTG"),
    "gradients_kernel": ("HGMMA", "UTMALDG"),
    "portable_prepare_kernel": ("HMMA", "LDSM", "LDGSTS"),
    "portable_forward_kernel": ("HMMA", "LDSM", "LDGSTS"),
    "portable_states_kernel": ("HMMA", "LDSM", "LDGSTS"),
    "portable_grad_chain_kernel": ("HMMA", "LDSM", "LDGSTS"),
    "portable_gradients_kernel": ("HMMA", "LDSM", "LDGSTS"),
    "fp32_loop_kernel": ("LDGSTS",),
}
PORTABLE = ("portable_", "fp32_")  # how the names of kernels begin that every architecture has
RECORDED = 90  # the architecture whose code is printed and compared

FATBIN = struct.pack("<I", 0xBA55ED50)
FATBIN_CUBIN = 2  # the kind of an entry; PTX is 1
ZSTD = struct.pack("<I", 0xFD2FB528)
LARGEST_IMAGE = 1 << 30
INSTRUCTION_BYTES = 16
REGISTER_COUNT = 0x2F  # attribute of .nv.info: symbol, registers


def sections_of(elf: bytes) -> dict[str, bytes]:
    """Contents by name; sections without contents in the file are left out."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names_at = headers[names][4]
    sections = {}
    for name_at, kind, _flags, _address, start, length in headers:
        name = elf[names_at + name_at : elf.index(b"\0", names_at + name_at)].decode()
        if kind not in (0, 8):  # none, or zeros
            sections[name] = elf[start : start + length]
    return sections


def decompressed(image: bytes) -> bytes:
    """What a zstd frame holds. By the system's library: Python has had a decoder since 3.14 only."""
    name = ctypes.util.find_library("zstd")
    if name is None:
        raise ValueError("the machine code is compressed, and there is no libzstd to read it with")
    zstd = ctypes.CDLL(name)
    for function in (zstd.ZSTD_getFrameContentSize, zstd.ZSTD_findFrameCompressedSize, zstd.ZSTD_decompress):
        function.restype = ctypes.c_size_t
    data = ctypes.c_char_p(image)
    size = zstd.ZSTD_getFrameContentSize(data, ctypes.c_size_t(len(image)))
    frame = zstd.ZSTD_findFrameCompressedSize(data, ctypes.c_size_t(len(image)))  # the entry is padded
    if zstd.ZSTD_isError(ctypes.c_size_t(frame)) or size > LARGEST_IMAGE:
        raise ValueError("the machine code is not a zstd frame of known size")
    buffer = ctypes.create_string_buffer(size)
    found = zstd.ZSTD_decompress(buffer, ctypes.c_size_t(size), data, ctypes.c_size_t(frame))
    if found != size:
        raise ValueError("the machine code cannot be decompressed")
    return buffer.raw


def cubins_of(fatbin: bytes) -> Iterator[tuple[int, bytes]]:
    """Architectures and images of a .nv_fatbin section: a container for each .cu file, an entry for each image."""
    at = 0
    while (at := fatbin.find(FATBIN, at)) >= 0:
        header_bytes, bytes_after = struct.unpack_from("<HQ", fatbin, at + 6)
        at += header_bytes
        end = at + bytes_after
        while at < end:
            kind, header_bytes, image_bytes = struct.unpack_from("<HxxIQ", fatbin, at)
            (architecture,) = struct.unpack_from("<I", fatbin, at + 28)
            image = fatbin[at + header_bytes : at + header_bytes + image_bytes]
            at += header_bytes + image_bytes
            if kind == FATBIN_CUBIN:
                yield architecture, decompressed(image) if image.startswith(ZSTD) else image


def registers_of(sections: dict[str, bytes]) -> dict[str, int]:
    """Registers by mangled name, as the driver reads them at a launch."""
    names = sections[".strtab"]
    info = sections[".nv.info"]
    registers = {}
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value is in the place of the length
            continue
        if attribute == REGISTER_COUNT:
            symbol, count = struct.unpack_from("<II", info, at)
            (name_at,) = struct.unpack_from("<I", sections[".symtab"], symbol * 24)
            registers[names[name_at : names.index(b"\0", name_at)].decode()] = count
        at += length
    return registers


def census_of(code: bytes) -> dict[str, int]:
    counts = Counter(word & 0x1FF for word, _ in struct.iter_unpack("<QQ", code))
    census = dict.fromkeys(OPCODES.values(), 0)
    for opcode, name in OPCODES.items():
        census[name] += counts[opcode]
    return census


def short_name(mangled: str) -> str:
    """forward_kernel<bf16, 2>: without namespaces, return type and parameters."""
    name = subprocess.run(["c++filt", mangled], check=True, capture_output=True, text=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", name)
    name = re.sub(r"^void |\([^()]*\)$", "", name)
    return name.replace("__nv_bfloat16", "bf16").replace("__half", "fp16")


class Kernel(NamedTuple):
    digest: str
    registers: int
    instructions: int
    census: dict[str, int]


def kernels_of(library: bytes, wanted: int = RECORDED) -> dict[str, Kernel]:
    """By name; of one architecture, 90a counting as 90."""
    kernels = {}
    for architecture, cubin in cubins_of(sections_of(library).get(".nv_fatbin", b"")):
        if architecture != wanted:
            continue
        sections = sections_of(cubin)
        registers = registers_of(sections)
        for section, code in sections.items():
            if not section.startswith(".text."):
                continue
            mangled = section.removeprefix(".text.")
            name = short_name(mangled)
            if name in kernels:
                raise ValueError(f"two kernels are called {name}")
            digest = hashlib.sha256(code).hexdigest()[:16]
            kernels[name] = Kernel(digest, registers[mangled], len(code) // INSTRUCTION_BYTES, census_of(code))
    return dict(sorted(kernels.items()))


def other_architectures(library: bytes) -> list[int]:
    fatbin = sections_of(library).get(".nv_fatbin", b"")
    return sorted({architecture for architecture, _ in cubins_of(fatbin)} - {RECORDED})


def problems_of(kernels: dict[str, Kernel], required: dict[str, tuple[str, ...]] = REQUIRED) -> list[str]:
    problems = []
    for name, kernel in kernels.items():
        problems += [f"{name}: {kernel.census[bad]} {bad}, must have none" for bad in FORBIDDEN if kernel.census[bad]]
    for prefix, opcodes in required.items():
        family = [name for name in kernels if name.startswith(prefix)]
        if not family:
            problems.append(f"{prefix}: there is no such kernel, so nothing was checked")
        problems += [
            f"{name}: no {opcode}, must have some"
            for name in family
            for opcode in opcodes
            if not kernels[name].census[opcode]
        ]
    return problems


def standing(name: str, kernel: Kernel, record: dict[str, dict]) -> str:
    """Code is found by its digest, under any name: a renamed kernel is still the one that was measured."""
    if any(recorded["digest"] == kernel.digest for recorded in record.values()):
        return "recorded"
    return "changed since" if name in record else "not in the record"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--compare", type=Path, help="the record to compare digests with; need not exist")
    options = parser.parse_args()

    try:
        library = options.library.read_bytes()
        kernels = kernels_of(library)
        others = {architecture: kernels_of(library, architecture) for architecture in other_architectures(library)}
    except (OSError, ValueError) as error:
        print(f"sass: {options.library}: {error}")
        return 1
    record = None
    if options.compare and options.compare.exists():
        record = json.loads(options.compare.read_text())["header"].get("kernels", {})
    elif options.compare:
        print(f"sass: there is no {options.compare} to compare with")
    for name, kernel in kernels.items():
        counts = ", ".join(f"{opcode} {count}" for opcode, count in kernel.census.items() if count)
        line = f"{name}: {kernel.registers} registers, {kernel.instructions} instructions ({counts}), {kernel.digest}"
        print(line if record is None else f"{line}, {standing(name, kernel, record)}")
    if options.json:
        found = {name: kernel._asdict() for name, kernel in kernels.items()}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    problems = problems_of(kernels)
    portable = {name: opcodes for name, opcodes in REQUIRED.items() if name.startswith(PORTABLE)}
    for architecture, found in others.items():
        problems += [f"sm_{architecture} {problem}" for problem in problems_of(found, portable)]
        missing = [name for name in kernels if name.startswith(PORTABLE) and name not in found]
        problems += [f"sm_{architecture} {name}: there is no such kernel" for name in missing]
    for problem in problems:
        print(f"sass: {problem}")
    for architecture, found in others.items():
        print(f"sass: sm_{architecture}: {len(found)} kernels")
    print(f"sass: {len(kernels)} kernels, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
