"""The files of this repository: tracked ones and new ones that git does not ignore."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def repo_files(*suffixes: str) -> list[Path]:
    """Paths relative to ROOT, sorted; only those ending in one of `suffixes` if any are given."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = {Path(name) for name in names if name and (not suffixes or name.endswith(suffixes))}
    return sorted(path for path in paths if (ROOT / path).is_file())
