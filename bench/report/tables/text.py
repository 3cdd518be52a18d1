"""How tables, numbers and peers are written."""

from bench.lib import serving
from bench.lib.rows import ERRORS
from bench.report.tables import files

NOTHING = "No measurement is recorded yet."
NO_BACKWARD = "No measurement of the backward is recorded yet."
NO_SERVING = "No measurement of serving is recorded yet."
EARLIER_MARK = "‡"  # after a ratio to a time of another run
EARLIER_LEGEND = f"{EARLIER_MARK}: the fastest peer's time is from an earlier run; without the mark from the same run."
LIBRARIES = {  # by the first word of a peer's name
    "flashinfer": "FlashInfer", "flash_qla": "FlashQLA", "fla": "FLA", "sglang": "SGLang", "vllm": "vLLM",
    "transformers": "transformers",
}  # fmt: skip
OPS = {"fwd": "forward", "bwd": "backward", "train": "forward+backward", "rec": "recurrent"}


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """`left`: columns that are words; numbers are aligned on the right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} µs" if value < 0.5 else f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def microseconds(ms: float) -> str:
    return f"{ms * 1e3:#.3g}" if ms < 0.0995 else f"{ms * 1e3:.0f}"


def three_digits(ms: float) -> str:
    return f"{ms:#.3g}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def h200_heading(header: dict) -> str:
    commit = header["commit"][:10] + (" with changes" if header["modified"] else "")
    driver = f"driver {header['driver']}, " if "driver" in header else ""
    return f"**{header['gpu']}**, {driver}torch {header['torch']}, {header['date']}, {commit}"


def picture(name: str, alt: str, root: str = "../") -> list[str]:
    """Markdown for it, if it exists; `root` is the path from the text to the top of the tree."""
    return [f"![{alt}]({root}results/h200/{name}.png)"] if (files.H200 / f"{name}.png").exists() else []


def speedup(row: dict) -> str:
    return f"{row['speedup']:.2f}×"


def serving_speedup(row: dict) -> str:
    """Empty without a peer."""
    if "speedup" not in row:
        return ""
    return f"{row['speedup']:.2f}×{EARLIER_MARK if serving.rests_on_recorded(row) else ''}"


def errors_of(row: dict) -> list[str]:
    return [f"{row[error]:.1e}" for error in ERRORS[row["kind"]]]


def peers_of(row: dict, peers: list[str]) -> list[str]:
    """A cell for each peer, empty if the peer has no time for this row."""
    return [three_digits(row["peers"][name]) if name in row["peers"] else "" for name in peers]


def peer_names(rows: list[dict]) -> list[str]:
    return sorted({name for row in rows for name in row["peers"]})


def by_heads(rows: list[dict]) -> dict[tuple[int, int], list[dict]]:
    groups = {}
    for row in rows:
        groups.setdefault((row["hk"], row["hv"]), []).append(row)
    return groups


def libraries_of(rows: list[dict]) -> str:
    *others, last = dict.fromkeys(LIBRARIES[peer.split()[0]] for peer in peer_names(rows))
    return f"the fastest of {', '.join(others)} and {last}" if others else last
