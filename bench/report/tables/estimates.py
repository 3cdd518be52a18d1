"""The portable forward on GPUs it has not been run on."""

import json

from bench.report.tables import files
from bench.report.tables.text import NOTHING, table


def other_gpus() -> str:
    path = files.H200 / "estimates.json"
    if not path.exists():
        return NOTHING
    result = json.loads(path.read_text())
    row = result["row"]
    cells = [
        [
            f"{e['gpu']}, {e['condition']}" if e["condition"] else e["gpu"],
            f"{e['products_ms']:.2f}",
            f"{e['bytes_ms']:.2f}",
            f"{e['low_ms']:.1f} to {e['high_ms']:.1f}" if e["high_ms"] - e["low_ms"] > 0.05 else f"{e['low_ms']:.1f}",
            e["limit"],
        ]
        for e in result["estimates"]
    ]
    return (
        f"**Estimates, not measurements**, for {row['hk']}/{row['hv']} {row['seq']}, K = V = {row['head_size']}; "
        f"the H200 took {result['measured_ms']:.2f} ms ({result['measured']['commit'][:10]}).\n\n"
        + table(["", "products alone, ms", "bytes alone, ms", "forward, ms", "limit"], cells)
    )


TABLES = {"other-gpus": other_gpus}
