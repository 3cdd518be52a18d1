"""JSON that a diff can be read of: one row, kernel or header field a line."""

from __future__ import annotations

import json
from pathlib import Path

COLUMNS = 400  # an object that fits is one line


def dumps(value: object, margin: str = "") -> str:
    """Lists of lists or objects get a line per item, longer objects a line per key."""
    line = json.dumps(value)
    deeper = margin + " "
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items, (begin, end) = [json.dumps(item) for item in value], "[]"
    elif isinstance(value, dict) and len(line) > COLUMNS:
        items, (begin, end) = [f"{json.dumps(key)}: {dumps(item, deeper)}" for key, item in value.items()], "{}"
    else:
        return line
    return f"{begin}\n" + ",\n".join(deeper + item for item in items) + f"\n{margin}{end}"


def write(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(value) + "\n")
