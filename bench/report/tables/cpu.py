"""Tables of the CPU backend."""

from bench.report.tables import files
from bench.report.tables.files import load
from bench.report.tables.text import NOTHING, milliseconds, table


def heading(result: dict) -> str:
    machine, recorded = result["machine"], result["recorded"]
    commit = recorded["commit"][:10] + (" with changes" if recorded["modified"] else "")
    cpus = f"{machine['cpus']} CPU{'s' if machine['cpus'] != 1 else ''}"
    return f"**{machine['cpu']}** ({machine['architecture']}, {cpus}), {recorded['date']}, {commit}"


def cpu_rows(result: dict) -> list[tuple[str, dict]]:
    """Name and times of every comparison with transformers."""
    rows = [
        (f"{kind}, 1 × {shape['tokens']} tokens, {shape['heads']} heads", shape[kind])
        for shape in result["shapes"]
        for kind in ("forward", "forward+backward")
    ]
    rows.append((f"decode, {result['decode']['heads']} heads, per token", result["decode"]))
    if "model" in result:  # not in older records
        rows.append((f"prefill of a small Qwen3.5, {result['model']['tokens']} tokens", result["model"]))
    return rows


def cpu_speed() -> str:
    parts = []
    for stem, result in load("transformers"):
        cells = [
            [name, *(milliseconds(row[side]["best_ms"]) for side in ("ours", "theirs")), f"{row['speedup']:.1f}×"]
            for name, row in cpu_rows(result)
        ]
        peers = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "gatedelta")
        rates = "; ".join(
            f"{shape['forward']['gflops']:.0f} of {shape['forward']['matmul_gflops']:.0f} GFLOP/s "
            f"({shape['forward']['share_of_matmul']:.0%}) with {shape['tokens']} tokens and {shape['heads']} heads"
            for shape in result["shapes"]
        )
        isa = result["machine"]["best_isa"]
        picture = f"![Speed and scaling](../results/cpu/{stem}.png)" if (files.RESULTS / f"{stem}.png").exists() else ""
        parts += [
            heading(result),
            f"bf16, K = V = 128, {isa}, {result['threads']} threads; transformers' code in the same run ({peers}):",
            table(["", "GateDelta", "transformers", "speedup"], cells),
            f"Rate of the forward and of torch's bf16 matmul: {rates}.",
            *([picture] if picture else []),
        ]
    return "\n\n".join(parts) or NOTHING


def accuracy() -> str:
    parts = []
    for _, result in load("transformers"):
        shapes = [(shape["tokens"], shape["heads"]) for shape in result["shapes"]]
        by_quantity = {}
        for error in result["errors"]:
            by_quantity.setdefault(error["quantity"], {})[error["tokens"], error["heads"]] = error
        cells = [
            [quantity, *(f"{errors[shape][side]:.1e}" for shape in shapes for side in ("ours", "theirs"))]
            for quantity, errors in by_quantity.items()
        ]
        header = [""]
        for tokens, heads in shapes:
            header += [f"1 × {tokens}, {heads} heads", "transformers"]
        parts += [
            heading(result),
            f"bf16, {result['machine']['best_isa']}, worst of {result['verified_heads']} heads:",
            table(header, cells),
        ]
    return "\n\n".join(parts) or NOTHING


TABLES = {"cpu-speed": cpu_speed, "accuracy": accuracy}
