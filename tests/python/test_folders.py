"""Which folder's Python may import which, outside of the package (test_imports.py) and of C++ (test_layers.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_imports import names_in

# A file belongs to the folder with the longest matching path, and may import its own folder and those listed here.
FOLDERS = {
    "tools": [],
    "examples": [],
    "testing": ["tools"],
    "bench": ["tools"],
    "bench/lib": [],
    "bench/peers": [],
    "bench/report": ["bench/lib", "tools"],
    "bench/plots": ["bench/lib", "bench/report"],
    "bench/cpu": ["bench/lib", "bench/peers", "testing", "tools"],
    "bench/gpu": ["bench/lib", "bench/peers", "bench/plots", "bench/report", "tools"],
    "tests": ["bench/gpu", "bench/lib", "bench/plots", "bench/report", "examples", "testing", "tools"],
}
# Their modules are imported by name alone, by one another and (pyproject.toml, pythonpath) by tests.
SCRIPTS = ("tools", "examples/train", "tests/python", "tests/python/stand_ins")
# The place that finds the package for all.
PATH_EDITOR = "tools/dev_paths.py"


def folder_of(path: str) -> str:
    return max((folder for folder in FOLDERS if path == folder or path.startswith(folder + "/")), key=len)


def target_of(path: str, name: str, files: set[str]) -> str | None:
    """The file of this repository that `name`, imported by `path`, is or is in."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        place = "/".join(parts[:depth])
        for base in ("", str(Path(path).parent) + "/", *(f"{folder}/" for folder in SCRIPTS)):
            for file in (f"{base}{place}.py", f"{base}{place}/__init__.py"):
                if file in files and (depth > 1 or len(parts) == 1 or base or file.endswith("__init__.py")):
                    return file
    return None


def arrows(sources: dict[str, str]) -> set[tuple[str, str]]:
    found, files = set(), set(sources)
    for path, text in sources.items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in names_in(module, path.endswith("__init__.py"), text):
            if target := target_of(path, name, files):
                found.add((path, target))
    return found


def violations(sources: dict[str, str]) -> list[str]:
    imports = [
        f"{path} imports {target}"
        for path, target in sorted(arrows(sources))
        if folder_of(target) not in (folder_of(path), *FOLDERS[folder_of(path)])
    ]
    edits = re.compile(r"\bsys\.path(\[[^]]*\])?\s*(\+?=|\.(insert|append|extend|pop|remove)\b)")
    return imports + [f"{path} edits sys.path" for path, text in sources.items()
                      if path != PATH_EDITOR and edits.search(text)]  # fmt: skip


@pytest.fixture(scope="module")
def sources(root) -> dict[str, str]:
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    found = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    # What stand-ins of other libraries import is theirs; this file names what it looks for.
    return {path: text for path, text in found.items()
            if "/packages/" not in path and path != "tests/python/test_folders.py"}  # fmt: skip


def test_every_import_is_allowed(sources):
    assert violations(sources) == []


def test_every_permission_is_used(sources):
    used = {(folder_of(path), folder_of(target)) for path, target in arrows(sources)}
    assert sorted({(folder, target) for folder, targets in FOLDERS.items() for target in targets} - used) == []


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("tools/lint.py", "from bench.report import render", "tools/lint.py imports bench/report/render.py"),
        ("tools/lint.py", "def f():\n    import truth\n", None),  # of no folder of ours
        ("tools/lint.py", "from testing import truth", "tools/lint.py imports testing/truth.py"),
        ("tools/records.py", "import conftest", "tools/records.py imports tests/python/conftest.py"),
        ("bench/lib/rows.py", "from bench.gpu import chunked", "bench/lib/rows.py imports bench/gpu/chunked.py"),
        (
            "bench/gpu/packs.py",
            "from tests.python import conftest",
            "bench/gpu/packs.py imports tests/python/conftest.py",
        ),
        ("examples/train/train.py", "import records", "examples/train/train.py imports tools/records.py"),
        ("bench/gpu/packs.py", "import sys\nsys.path.insert(0, 'tests')", "bench/gpu/packs.py edits sys.path"),
        ("tests/python/conftest.py", "import sys\nsys.path[:0] = ['bench']", "tests/python/conftest.py edits sys.path"),
    ],
)
def test_a_forbidden_import_is_found(sources, path, line, found):
    planted = violations({**sources, path: line + "\n"})
    assert planted == ([found] if found else [])
