"""The package as an installer would leave it: its entry points where importlib.metadata finds them."""

from __future__ import annotations

import re
from pathlib import Path

from tools import dev_paths


def write(folder: Path) -> str:
    """A folder for the path, with metadata made of pyproject.toml."""
    text = (dev_paths.ROOT / "pyproject.toml").read_text()
    points = re.findall(r'^\[project\.entry-points\."(.+?)"\]\n(\w+) = "(.+?)"$', text, re.MULTILINE)
    info = folder / "gatedelta-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gatedelta\nVersion: 0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {call}\n" for group, name, call in points))
    return str(folder)
