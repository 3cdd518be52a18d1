"""The pages about plug-ins: every Python block is a script that runs, and the index and the pages name each other.

A block that needs packages says so in its first line, `# needs: package, package`, and is skipped
where one of these cannot be imported.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import dev_paths

INDEX = dev_paths.ROOT / "docs" / "integrations.md"
PAGES = sorted((dev_paths.ROOT / "docs" / "integrations").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"# needs: *(.+)")


def blocks_of(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line its code begins at."""
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]


def needs_of(code: str) -> list[str]:
    match = NEEDS.match(code)
    return [name.strip() for name in match[1].split(",")] if match else []


@functools.cache
def missing(name: str) -> str | None:
    """Why this package cannot be imported, or None. A package that is there but breaks counts as missing: some of these
    frameworks look for a GPU as they are imported. Another Python tries it, so that this one stays as it is."""
    result = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, timeout=300)
    return result.stderr.strip().splitlines()[-1] if result.returncode else None


def links_of(text: str) -> set[str]:
    return set(re.findall(r"\]\((integrations/[^)#]+)", text))


SCRIPTS = [
    pytest.param(code, id=f"{page.stem}:{line}")
    for page in [INDEX, *PAGES]
    if page.is_file()
    for line, code in blocks_of(page.read_text())
]


@pytest.mark.parametrize("code", SCRIPTS)
def test_block_runs(run_python, tmp_path: Path, code: str):
    for name in needs_of(code):
        reason = missing(name)
        if reason:
            pytest.skip(f"needs {name} ({reason})")
    script = tmp_path / "block.py"
    script.write_text(code)
    run_python(str(script))


def test_the_index_links_every_page_and_nothing_else():
    assert links_of(INDEX.read_text()) == {f"integrations/{page.name}" for page in PAGES}


def test_blocks_and_needs_are_found():
    page = "text\n\n```python\n# needs: a, b.c\nx = 1\n```\n\n```c\nint x;\n```\n\n```python\ny = 2\n```\n"
    assert blocks_of(page) == [(4, "# needs: a, b.c\nx = 1\n"), (13, "y = 2\n")]
    assert [needs_of(code) for _, code in blocks_of(page)] == [["a", "b.c"], []]
    assert missing("json") is None and "no_such_package" in missing("no_such_package")
