"""Profiles the kernels of one row with Nsight Compute: their durations, and how busy they keep the parts of the GPU."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

KERNELS = ("prepare_kernel", "schedule_kernel", "forward_kernel")
METRICS = {  # all as shares of the whole duration; the names are valid on Hopper
    "duration_us": "gpu__time_duration.sum",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "shared_pct": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
MICROSECONDS = {"n": 1e-3, "u": 1.0, "m": 1e3, "s": 1e6}  # by the first letter of ncu's unit


def find() -> str | None:
    return shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")


def parse(text: str) -> dict[str, dict[str, float]]:
    """Values by kernel from `ncu --csv --page raw`; metrics without a value are left out."""
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))  # not ncu's own messages
    names, units, *launches = table if len(table) > 2 else ([], [])
    found = {}
    for launch in launches:
        cells, unit_of = dict(zip(names, launch)), dict(zip(names, units))
        kernel = re.search(r"\w+_kernel", cells["Kernel Name"])
        if not kernel:
            continue
        values = {}
        for name, metric in METRICS.items():
            try:
                value = float(cells.get(metric, "").replace(",", ""))
            except ValueError:
                continue
            values[name] = value * MICROSECONDS[unit_of[metric][0]] if name == "duration_us" else value
        found[kernel[0]] = values
    return found


def profile(ncu: str, command: list[str]) -> dict[str, dict[str, float]]:
    """Runs a command that calls the forward at least three times and profiles the third call, when clocks are high.

    Raises RuntimeError with ncu's message if there are no values.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        result = subprocess.run(
            [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--log-file", log,
             "--kernel-name", f"regex:{'|'.join(KERNELS)}", "--launch-skip", str(2 * len(KERNELS)),
             "--launch-count", str(len(KERNELS)), "--metrics", ",".join(METRICS.values()), *command],
            capture_output=True, text=True,
        )  # fmt: skip
        text = log.read_text() if log.exists() else ""
    found = parse(text)
    if not found:
        raise RuntimeError((text or result.stderr or result.stdout).strip()[-500:] or "ncu printed nothing")
    return found
