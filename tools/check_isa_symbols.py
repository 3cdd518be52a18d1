#!/usr/bin/env python3
"""Makes sure that code compiled for one instruction set cannot reach a machine without it.

Each src/cpu/isa/<isa>.cpp is compiled with its own -m flags. If such an object exports an inline function that other
objects export too (std::vector's, a shared header's), the linker keeps one copy of the many, perhaps the AVX-512 one,
for everybody. So every function an ISA object exports must live in, or be instantiated with a type of, namespace
gatedelta::cpu::<isa>.

usage: check_isa_symbols.py BUILD_FOLDER [--nm NM]
"""

import argparse
import subprocess
import sys
from pathlib import Path

# Exported function symbols: strong (T), weak (W), GNU indirect (i). Weak data (V, u) holds no instructions.
FUNCTION_TYPES = "TWi"


def exported_functions(nm: str, path: Path) -> list[str]:
    listing = subprocess.run([nm, "--demangle", "--defined-only", path], check=True, capture_output=True, text=True)
    functions = []
    for line in listing.stdout.splitlines():
        _, kind, name = line.split(maxsplit=2)
        if kind in FUNCTION_TYPES:
            functions.append(name)
    return functions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build_folder", type=Path)
    parser.add_argument("--nm", default="nm", help="the nm of the objects' architecture")
    arguments = parser.parse_args()

    objects = sorted(path for path in arguments.build_folder.rglob("*.o") if path.parent.parts[-2:] == ("cpu", "isa"))
    if not objects:
        print(f"check_isa_symbols: no cpu/isa/*.o under {arguments.build_folder}")
        return 1
    bad = 0
    for path in objects:
        isa = path.name.split(".")[0]
        functions = exported_functions(arguments.nm, path)
        own = [name for name in functions if f"gatedelta::cpu::{isa}::" in name]
        strays = [name for name in functions if name not in own]
        if not own:
            print(f"{path}: exports nothing of namespace gatedelta::cpu::{isa}")
            bad += 1
        for name in strays:
            print(f"{path}: exports {name}")
            bad += 1
        print(f"{isa}: {len(own)} functions of its own, {len(strays)} strays")
    print(f"check_isa_symbols: {len(objects)} objects, {bad} problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
