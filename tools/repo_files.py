"""The files of this repository (tracked ones and new ones that git does not ignore), and what state it is in."""

import datetime
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def repo_files(*suffixes: str) -> list[Path]:
    """Paths relative to ROOT, sorted; only those ending in one of `suffixes` if any are given."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = {Path(name) for name in names if name and (not suffixes or name.endswith(suffixes))}
    return sorted(path for path in paths if (ROOT / path).is_file())


def stamp() -> dict:
    """Date, commit, and whether the tree differs from it; of a tree without git both are None."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        # What a record itself writes does not make the measured code another one.
        modified = bool(git("status", "--porcelain", "--", ".", ":!results", ":!*.md", ":!tools", ":!bench/report"))
    except (OSError, subprocess.CalledProcessError):
        commit = modified = None
    return {"date": datetime.date.today().isoformat(), "commit": commit, "modified": modified}
