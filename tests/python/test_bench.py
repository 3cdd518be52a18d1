"""The benchmark scripts run, and what they write is complete; the plots can be drawn. Times are not judged here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def comparison(run_python, tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    output = tmp_path_factory.mktemp("bench") / "cpu.json"
    result = run_python("-m", "bench.cpu.vs_transformers", "--smoke", "--repeats", "1", "--output", str(output))
    assert "error against the fp64 recurrence" in result.stdout
    return output


def test_comparison_is_complete(comparison):
    result = json.loads(comparison.read_text())
    assert {"machine", "versions", "shapes", "decode", "model", "scaling", "errors", "bars"} <= result.keys()
    assert result["model"]["ours"]["best_ms"] > 0 and result["model"]["theirs"]["best_ms"] > 0
    for shape in result["shapes"]:
        for kind in ("forward", "forward+backward"):
            assert shape[kind]["ours"]["best_ms"] > 0 and shape[kind]["theirs"]["best_ms"] > 0
        assert shape["forward"]["share_of_matmul"] > 0
    assert {s["threads"] for s in result["scaling"]} >= {1}
    # transformers computes in fp32 and rounds to bf16 once; a side that computed something else would show here.
    assert all(0 < e["theirs"] < 3e-3 for e in result["errors"])
    assert all(0 < e["ours"] < 2e-2 for e in result["errors"])


def test_bars_are_judged(comparison):
    """On made-up speeds: each bar can be passed and missed."""
    from bench.lib import targets

    def verdicts(speed: float, share: float) -> list[bool]:
        result = json.loads(comparison.read_text())
        for shape in result["shapes"]:
            for kind in ("forward", "forward+backward"):
                shape[kind]["speedup"] = speed
            shape["forward"]["share_of_matmul"] = share
        result["decode"]["speedup"] = result["model"]["speedup"] = speed
        return [bar["passed"] for bar in targets.judged_on_cpu(result)]

    assert verdicts(5.5, 0.44) == [True, False, True, False, False, True, False]
    assert verdicts(20, 0.45) == [True] * 7


@pytest.fixture(scope="module")
def has_gpu() -> bool:
    torch = pytest.importorskip("torch")
    import gatedelta

    return torch.cuda.is_available() and gatedelta.info()["cuda_devices"] > 0


@pytest.fixture
def refuses(monkeypatch, capsys):
    """Has a benchmark, in this process, exit with this status and say why."""

    def run(status: int, reason: str, module: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as end:
            importlib.import_module(module).main()
        code = end.value.code  # a text, which Python prints, is status 1
        assert (code if isinstance(code, int) else 1) == status
        assert reason in (capsys.readouterr().err if isinstance(code, int) else code)

    return run


NO_GPU = "no GPU, or none that is supported"
PNG = b"\x89PNG"


@pytest.fixture
def draw(monkeypatch, capsys):
    """python -m bench.plots, in this process; with `refusal`, it must refuse and say so."""
    pytest.importorskip("matplotlib")
    plt = pytest.importorskip("matplotlib.pyplot")
    from bench.plots import __main__ as plots

    def run(*arguments: object, refusal: str = "") -> None:
        monkeypatch.setattr(sys, "argv", ["plots", *map(str, arguments)])
        if not refusal:
            plots.main()
        else:
            with pytest.raises(SystemExit) as refused:
                plots.main()
            assert refused.value.code == 2 and refusal in capsys.readouterr().err
        plt.close("all")

    return run


def assert_pictures(folder: Path, names: set[str]) -> None:
    assert {path.name for path in folder.iterdir()} == names
    assert all(path.read_bytes().startswith(PNG) for path in folder.iterdir())


def assert_picture(path: Path) -> None:
    assert path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000


def test_plot_of_the_comparison(draw, comparison, tmp_path):
    picture = tmp_path / "cpu.png"
    draw("cpu", comparison, picture)
    assert_picture(picture)


RUN = {
    "command": "run",
    "machine": {"architecture": "x86_64", "cpu": "a CPU", "cpus": 2, "best_isa": "avx2"},
    "tokens": 1024,
    "isa": "avx2",
    "threads": 2,
    "timings": [
        {"op": op, "isa": "avx2", "threads": 2, "median_ms": 3.0, "best_ms": 2.5, "repeats": 3, "tokens_per_s": 1e4,
         "gflops": 50.0}
        for op in ("fwd", "bwd")
    ],
    "verified_value_heads": 2,
    "errors": [{"quantity": "o", "error": 1e-3, "bound": 4e-3, "ok": True},
               {"quantity": "dq", "error": 9e-3, "bound": 5e-3, "ok": False}],
}  # fmt: skip


def test_plot_of_a_run(draw, tmp_path):
    results, picture = tmp_path / "run.json", tmp_path / "pictures" / "run.png"
    arm = {"architecture": "aarch64", "cpu": "Neoverse-V1", "cpus": 2, "best_isa": "neon"}
    for run in (RUN, RUN | {"machine": arm}):
        results.write_text(json.dumps(run))
        draw("cpu", results, picture)
        assert picture.read_bytes().startswith(PNG)
        picture.unlink()
    results.write_text(json.dumps({"command": "something else"}))
    draw("cpu", results, picture, refusal="something else")


def test_plot_of_what_the_tool_writes(run_python, tmp_path):
    """The command line tool and the plot agree on the format."""
    pytest.importorskip("matplotlib")
    from tools import dev_paths

    tool = dev_paths.BUILD / "cli" / "gatedelta"
    if not tool.exists():
        pytest.skip("the command line tool is not built")
    results, picture = tmp_path / "run.json", tmp_path / "run.png"
    subprocess.run(
        [tool, "run", "--tokens", "128", "--seconds", "0.01", "--verify", "1", "--json", results],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    run_python("-m", "bench.plots", "cpu", str(results), str(picture))
    assert picture.read_bytes().startswith(PNG)
    machine = json.loads(results.read_text())["machine"]
    assert machine["cpu"] and machine["cpus"] > 0


def gpu_row(hv: int, seq: str, ms: float, **more) -> dict:
    return {"kind": "fwd", "hk": hv // 4, "hv": hv, "seq": seq, "ms": ms, **more}


def backward_row(hk: int, hv: int, seq: str, ms: float, **more) -> dict:
    return {"kind": "bwd", "hk": hk, "hv": hv, "seq": seq, "ms": ms, **more}


def test_peers_have_every_row():
    from bench.lib import ratios, rows

    gpu, peers = ratios.load_peers()
    every = rows.forward_rows() + rows.backward_rows()
    assert gpu == "NVIDIA H200"
    assert set(peers) == {ratios.key(row) for row in every} and len(peers) == len(every) == 171 + 32
    assert all(ms > 0 for times in peers.values() for ms in times.values())


def test_peers_are_joined_on_the_same_gpu_only():
    from bench.lib import ratios

    rows = [gpu_row(64, "8192x4", 0.5)]
    (joined,) = ratios.with_peers({"header": {"gpu": "NVIDIA H200"}, "rows": rows})
    assert joined["speedup"] == joined["best_peer_ms"] / 0.5 and "peers" not in rows[0]
    assert ratios.with_peers({"header": {"gpu": "NVIDIA H100"}, "rows": rows}) == rows


def test_json_has_a_line_per_row():
    from tools import records

    value = {"header": {"a": "x" * records.COLUMNS, "b": {"c": 1}}, "rows": [{"d": [1, 2]}, {}], "none": []}
    lines = records.dumps(value).splitlines()
    assert json.loads("\n".join(lines)) == value
    assert lines[3:] == ['  "b": {"c": 1}', " },", ' "rows": [', '  {"d": [1, 2]},', "  {}", " ],", ' "none": []', "}"]


def test_backward_rows():
    from bench.lib import rows

    backward = rows.backward_rows()
    assert rows.of_kind(rows.forward_rows() + backward, "bwd") == backward
    assert {(row["hk"], row["hv"]) for row in backward} == {(16, 32), (8, 16), (4, 8), (2, 4)}
    for row in backward:
        tokens, _, count = row["seq"].removesuffix("seq").partition("k_")
        assert sum(row["lengths"]) == 1024 * int(tokens) and len(row["lengths"]) == int(count)
        assert rows.lengths_of(row) is row["lengths"] and min(row["lengths"]) > 0
        small = rows.scaled_down(row["lengths"])
        assert len(small) == len(row["lengths"]) and min(small) > 0 and 1000 < sum(small) <= 1024
    assert rows.scaled_down([1, 32767]) == [1, 1023]


def test_ratios():
    from bench.lib import ratios

    peers = {
        ("fwd", 16, 64, "8192x4"): {"slow": 3.0, "fast": 1.0, "x published": 0.9},
        ("fwd", 2, 8, "8192x4"): {"fast": 1.0, "x published": 2.0},
        ("fwd", 2, 8, "1x2048"): {"x published": 1.0},
    }
    rows = [gpu_row(64, "8192x4", 0.5), gpu_row(8, "8192x4", 2.0), gpu_row(8, "1x2048", 1.0)]
    found = [ratios.compared(row, peers) for row in rows]
    assert [row.get("speedup") for row in found] == [2.0, 0.5, None]
    assert found[0]["best_peer_ms"] == 1.0 and ratios.best_peer(found[0]) == "fast"
    assert [ratios.shorter_published(row) for row in found[:2]] == [0.9, None]
    assert "peers" not in found[2]  # none of them was measured
    assert ratios.summary(found) == {"rows": 2, "geomean": pytest.approx(1), "worst": found[1]}
    assert ratios.summary(found[2:]) is None


def test_kinds_are_summed_up_apart():
    pytest.importorskip("torch")
    from bench.gpu import chunked as gpu

    rows = [gpu_row(64, "8192x4", 1.0), gpu_row(8, "1x2048", 1.0), backward_row(2, 4, "8k_1seq", 1.0)]
    forward, full, backward = gpu.groups_of(rows).values()
    assert (forward, full, backward) == (rows[:2], rows[:1], rows[2:])
    assert gpu.kinds("bwd") == ["bwd"] and gpu.kinds("fwd,bwd") == list(gpu.KINDS)
    with pytest.raises(gpu.argparse.ArgumentTypeError, match="'fwd,both' is not a list of fwd, bwd"):
        gpu.kinds("fwd,both")


def test_true_gradients(monkeypatch):
    """Those that errors on the GPU are taken from are those of the CPU backend, up to its rounding."""
    torch = pytest.importorskip("torch")
    from bench.gpu import chunked as gpu

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    row = {"hk": 3, "hv": 6, "lengths": [1, 9, 4]}
    inputs = gpu.make_inputs(row)
    gradients = gpu.make_gradients(inputs)
    truth = gpu.true_gradients(row, inputs, gradients, 4)
    found = gpu.run_backward(inputs, gradients, gpu.run_forward(inputs))
    assert truth.keys() == found.keys() == set(gpu.GRADIENTS)
    for name, true in truth.items():
        assert true.shape[1] == (2 if name in ("dq", "dk") else 4)
        x = found[name] if name == "dh0" else found[name][0]
        assert 0 < gpu.distance(x[:, : true.shape[1]], true) < 5e-3
    leaves = inputs | {name: inputs[name].detach().requires_grad_() for name in gpu.LEAVES}
    assert all(map(torch.equal, gpu.train(leaves, gradients), found.values()))


def test_rows_that_fill_the_gpu():
    from bench.lib import ratios, rows

    assert ratios.is_full(gpu_row(64, "1x2048", 1.0)) and ratios.is_full(gpu_row(32, "4096+4096", 1.0))
    assert not ratios.is_full(gpu_row(32, "1x32768", 1.0)) and not ratios.is_full(gpu_row(8, "8192x4", 1.0))
    assert sum(map(ratios.is_full, rows.forward_rows())) == 89
    assert [ratios.is_full(backward_row(4, 8, seq, 1.0)) for seq in ("8k_8seq", "32k_4seq")] == [True, False]


NCU_LOG = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
"","","us","%"
"0","void gatedelta::cuda::prepare_kernel<__nv_bfloat16>(ForwardParams)","125.50","n/a"
"1","gatedelta::cuda::schedule_kernel(gatedelta::cuda::ForwardParams)","8.25","0.00"
"2","void gatedelta::cuda::forward_kernel<__nv_bfloat16>(ForwardParams)","1,522.46","66.60"
"""


@pytest.mark.parametrize("unit, factor", [("ns", 1e-3), ("us", 1), ("msecond", 1e3)])
def test_profile_is_read(unit, factor):
    from bench.lib import ncu

    assert ncu.parse(NCU_LOG.replace('"us"', f'"{unit}"')) == {
        "prepare_kernel": {"duration_us": pytest.approx(125.5 * factor)},
        "schedule_kernel": {"duration_us": pytest.approx(8.25 * factor), "tensor_pct": 0.0},
        "forward_kernel": {"duration_us": pytest.approx(1522.46 * factor), "tensor_pct": 66.6},
    }


def test_profile_of_a_command(tmp_path):
    from bench.lib import ncu

    tool, log = tmp_path / "ncu", tmp_path / "said"
    log.write_text(NCU_LOG)
    find_log = 'while [ "$1" != --log-file ]; do shift; done'
    tool.write_text(f'#!/bin/sh\n{find_log}\ncp {log} "$2"\n')
    tool.chmod(0o755)
    assert set(ncu.profile(str(tool), ["true"])) == set(ncu.KERNELS)
    log.write_text("==ERROR== no permission\n")
    with pytest.raises(RuntimeError, match="no permission"):
        ncu.profile(str(tool), ["true"])


def write_peers(path, rows: list[dict]) -> list[str]:
    """Writes the rows' made-up peers to a table of their own; the arguments that name it."""
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "rows": rows}))
    return ["--peers", str(path)]


def test_plots_of_gpu_rows(draw, tmp_path):
    results, folder = tmp_path / "h200.json", tmp_path / "pictures"
    header = {"gpu": "NVIDIA H200", "torch": "2.11", "gatedelta": "0.1.0"}
    rows = [gpu_row(hv, seq, 0.5, peers={"fla 1": 0.6, "other published": ms})
            for hv in (8, 64) for seq, ms in (("1x2048", 0.3), ("8192x4", 2.0))]  # fmt: skip
    peers = write_peers(tmp_path / "peers.json", rows)
    results.write_text(json.dumps({"header": header, "rows": rows}))
    draw("chunked", results, folder, *peers)
    assert_pictures(folder, {"2x8.png", "16x64.png", "overview.png"})
    results.write_text(json.dumps({"header": header, "rows": [gpu_row(8, "8192x4", 1.0), gpu_row(8, "1x4096", 1.0)]}))
    draw("chunked", results, folder)  # the table of the repository has these
    results.write_text(json.dumps({"header": header, "rows": [gpu_row(8, "1x4096", 1.0)]}))
    draw("chunked", results, folder, *peers, refusal="has times for no row of")


@pytest.mark.parametrize("seqs", [("8k_1seq", "8k_4seq", "32k_1seq"), ("32k_2seq",)])
def test_plots_of_the_backward(draw, tmp_path, seqs):
    """Beside those of the forward or alone, and where not every peer has every row."""
    results, folder = tmp_path / "h200.json", tmp_path / "pictures"
    header = {"gpu": "NVIDIA H200", "torch": "2.11", "gatedelta": "0.1.0"}
    rows = [backward_row(hk, 2 * hk, seq, 0.5, peers={"flash_qla 1": 0.6, "fla 1": 2.0})
            for hk in (2, 16) for seq in seqs]  # fmt: skip
    del rows[0]["peers"]["flash_qla 1"]
    names = {"backward-2x4.png", "backward-16x32.png", "backward-overview.png"}
    for forward in ([], [gpu_row(8, "1x2048", 0.5, peers={"fla 1": 0.6})]):
        peers = write_peers(tmp_path / "peers.json", forward + rows)
        results.write_text(json.dumps({"header": header, "rows": forward + rows}))
        draw("chunked", results, folder, *peers)
        assert_pictures(folder, names | ({"2x8.png", "overview.png"} if forward else set()))


def test_plot_of_the_history(draw, root, tmp_path):
    history, picture = root / "results" / "h200" / "history.csv", tmp_path / "pictures" / "history.png"
    lines = history.read_text().splitlines()
    for count in (len(lines), 2):  # all, and the first one alone, which has no backward
        some = tmp_path / "history.csv"
        some.write_text("\n".join(lines[:count]) + "\n")
        draw("history", some, picture)
        assert_picture(picture)
        picture.unlink()
    some.write_text(lines[0] + "\n")
    draw("history", some, picture, refusal="holds no record")


def test_gpu_rows(run_python, has_gpu, tmp_path):
    if not has_gpu:
        pytest.skip(NO_GPU)
    output, kernels = tmp_path / "h200.json", tmp_path / "kernels.json"
    kernels.write_text('{"k": {"digest": "0"}}')
    run_python("-m", "bench.gpu.chunked", "--only", "2/8", "--seq", "1x2048", "--repeats", "2",
               "--kernels", str(kernels), "--output", str(output))  # fmt: skip
    result = json.loads(output.read_text())
    assert {"gpu", "driver", "torch", "date", "commit", "eager_call_us"} <= result["header"].keys()
    assert result["header"]["kernels"] == {"k": {"digest": "0"}}
    (row,) = result["rows"]
    assert row["ms"] > 0 and 0 < row["err_o"] < 1e-2 and 0 < row["err_state"] < 1e-2
    run_python("-m", "bench.gpu.chunked", "--kinds", "bwd", "--only", "2/4", "--seq", "8k_8seq", "--repeats", "2",
               "--output", str(output))  # fmt: skip
    (row,) = json.loads(output.read_text())["rows"]
    assert row["train_ms"] > row["ms"] > 0 and row["small_ms"] > 0 and row["saved_bytes"] >= 0
    assert row["workspace_bytes"] >= row["small_workspace_bytes"] > 0
    assert len(row["verified_lengths"]) == 8
    assert all(0 < row[f"err_{name}"] < 2e-2 for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0"))


def test_eager_layers(run_python):
    report = run_python("-m", "bench.gpu.eager", "--device", "cpu", "--batches", "15").stdout
    rows = {line[:52].strip(): float(line[52:]) for line in report.splitlines()[1:]}
    whole = {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule, in a pool"}
    parts = {"gd_forward", "gd_forward_workspace", "gd_recurrent", "Python, to the operator"}
    assert whole | parts <= rows.keys()
    assert all(rows[name] > 0 for name in (whole | parts) - {"Python, to the operator"})  # that one is a difference


def test_segments_shapes():
    from bench.lib import rows

    others = rows.other_rows()
    assert len(others) == 5 * 4 + 2 * 30 and others == rows.other_rows()
    assert {(row["hk"], row["hv"]) for row in others} == {(2, 4), (3, 6), (6, 12), (10, 20), (20, 40), (2, 8), (8, 32)}
    for lengths in rows.mixes().values():
        assert 3 <= len(lengths) <= 15 and sum(lengths) == 40000 and min(lengths) > 0
    every = rows.forward_rows() + others
    names = {(row["hk"], row["hv"], row["seq"]) for row in every}
    assert len(names) == len(every) == 171 + 80


def test_segments_filters():
    from bench.lib import rows

    every = rows.forward_rows() + rows.other_rows()
    assert rows.selected(every, None, None) == every
    assert len(rows.selected(every, "2/8", None)) == 19 + 30
    assert [row["lengths"] for row in rows.selected(every, "10/20", "1x777")] == [[777]]
    assert rows.selected(every, "10/20", "8192x4") == []


def test_segments_forced():
    from bench.lib import regret

    def lengths(tokens):
        cuts = regret.equal_cuts(tokens)
        assert all(cut == regret.Cut(cut.decaying, cut.decaying, False) for cut in cuts)
        return [cut.decaying for cut in cuts]

    assert lengths([64]) == lengths([128, 1]) == []
    assert lengths([1, 129]) == [2]
    assert lengths([777]) == [2, 3, 4, 6, 8, 12]  # 13 chunks
    assert lengths([64 * 256]) == list(regret.SEGMENTS[:-1])
    for cut in (regret.Cut(32, 24), regret.Cut(0, 8, True)):
        assert regret.Cut.named(str(cut)) == cut
    assert regret.neighbours(regret.Cut(0, 16), 64) == [
        (32, 16, False), (0, 22, False), (0, 13, False), (0, 16, True),
    ]  # fmt: skip
    assert (0, 0, True) not in regret.neighbours(regret.Cut(32, 0), 64)


SEGMENT_ROW = {"kind": "fwd", "hk": 2, "hv": 8, "seq": "1x2048", "lengths": [2048]}


def test_segments_measured_in_turn():
    from bench.lib import regret

    cuts = [regret.Cut(n, n) for n in (2, 4, 8, 16, 32)]
    times = dict(zip([regret.AUTO, regret.OFF, *cuts], (1.0, 5.0, None, 1.1, 1.2, 1.3, 1.4)))
    calls = []

    def measure(choice):
        """Everything takes longer and longer, as on a card that gets hot."""
        calls.append(choice)
        return times.get(choice) and times[choice] + 0.01 * len(calls)

    found = regret.searched(measure, cuts, 64)
    new = regret.neighbours(cuts[1], 64)  # of the fastest; refused here
    assert calls[7 : 7 + len(new)] == new
    assert set(found) == set(times) - {cuts[0]}  # what is refused is left out
    assert found[regret.OFF] == pytest.approx(5.02) and found[cuts[4]] == pytest.approx(1.47)  # measured once
    assert calls[7 + len(new) :] == [regret.AUTO, *cuts[1:4]] * regret.ROUNDS
    second = 0.01 * (7 + len(new) + 5)  # in the same turn, the second
    assert found[regret.AUTO] == pytest.approx(1 + second) and found[cuts[1]] == pytest.approx(1.11 + second)
    assert regret.searched(lambda choice: 1.0, [], 1) == {regret.AUTO: 1.0, regret.OFF: 1.0}

    def by_length(choice):
        return 1.0 if isinstance(choice, str) else 2 + abs(choice.decaying - 9) + abs(choice.persistent - 16)

    walked = regret.searched(by_length, [regret.Cut(16, 16)], 64)
    assert min(walked.values()) == 1.0 and walked[regret.Cut(11, 16)] == 4.0  # from neighbour to neighbour


LENGTHS = (8, 12, 16, 24, 32, 48)


def test_costs_are_fitted_to_cuts():
    """Times made with known constants, and more for prepare: the fit chooses as well as those do."""
    from bench.lib import regret
    from bench.report import fit_costs

    head = fit_costs.Cut()
    fit_costs.add_head(head, 30, 10, persists=False, ratio=0.7)
    assert [item[1:3] for item in head.free] == [(10, 0), (10, 6), (10, 6)]  # chunks, and warm-up chunks
    shared = fit_costs.Cut()
    fit_costs.add_head(shared, 30, 10, persists=False, ratio=0.7, per_head=2)
    assert sorted(shared.free) == sorted(2 * head.free)
    merged = fit_costs.Cut()
    fit_costs.add_head(merged, 40, 10, persists=True, ratio=0.7)
    assert merged.boundaries == 3 and len(merged.first) == 5 and len(merged.waiting) == 3
    costs = fit_costs.Costs()
    one_by_one = fit_costs.time_of(head, costs, 1)
    assert one_by_one == pytest.approx(3 * costs.item + 30 * costs.chunk + 12 * costs.warmup)
    assert fit_costs.time_of(head, costs, 3) == pytest.approx(costs.item + 10 * costs.chunk + 6 * costs.warmup)

    truth = fit_costs.Costs(chunk=2.4, item=9.0, merge=1.5)
    rows = []
    for hv, tokens in ((8, 8192), (16, 4096), (8, 20000), (32, 6000)):
        row = {"hv": hv, "lengths": [tokens]}
        cuts = {cut: fit_costs.forced_cut(row, cut) for cut in map(regret.Cut, LENGTHS, LENGTHS[::-1])}
        uncut, halves = fit_costs.uncut(row, 132)
        rows.append(row | {
            "off_ms": (30 + fit_costs.time_of(uncut, truth, 132, halves)) / 1e3,
            "forced": {str(n): (30 + fit_costs.time_of(cut, truth, 132)) / 1e3 for n, cut in cuts.items()},
        })  # fmt: skip
    samples = fit_costs.samples_of(rows, 132)
    before, found = (fit_costs.judge(c, samples, 132) for c in (costs, fit_costs.fit(samples, 132, 8)))
    assert found[0] <= before[0] and found[1] < before[1] / 2
    assert "kChunk = 3250" in fit_costs.text_of(costs)

    row = {"hv": 8, "lengths": [8192]}
    few, many = (fit_costs.candidates(row, 132, count) for count in (5, 50))
    assert len(set(many)) == 50 and many[:5] == few
    halves = [fit_costs.time_of(fit_costs.forced_cut(row, cut), costs, 132, cut.halves) for cut in many]
    assert halves == sorted(halves)


def test_segments_regret():
    from bench.lib import regret

    rows = [
        regret.judged(SEGMENT_ROW, 1.1, 2.0, {regret.Cut(4, 4): 1.0, regret.Cut(8, 0, True): 1.5}),
        regret.judged(SEGMENT_ROW, 1.0, 1.0, {regret.Cut(4, 4): 2.0}),
        regret.judged(SEGMENT_ROW, 0.9, 1.0, {}),
    ]
    assert rows[0] == {
        "hk": 2, "hv": 8, "seq": "1x2048", "lengths": [2048], "auto_ms": 1.1, "off_ms": 2.0,
        "forced": {"4/4": 1.0, "8/0 halves": 1.5}, "best_ms": 1.0, "regret": pytest.approx(0.1),
    }  # fmt: skip
    assert [row["regret"] for row in rows[1:]] == pytest.approx([0, -0.1])
    assert regret.summary(rows) == {"rows": 3, "worst": rows[0], "median": 0, "mean": pytest.approx(0), "above": 1}


def test_segments_plot(draw, tmp_path):
    from bench.lib import regret, rows

    results, picture = tmp_path / "segments.json", tmp_path / "pictures" / "segments.png"
    header = {"gpu": "NVIDIA H200", "torch": "2.11", "gatedelta": "0.1.0"}
    measured = []
    for row in rows.forward_rows():
        chunks = sum(row["lengths"]) / 64
        forced = {
            cut: 0.05 + 0.002 * cut.decaying + 0.001 * chunks / cut.decaying
            for cut in regret.equal_cuts(row["lengths"])
        }
        measured.append(regret.judged(row, 1.04 * min(forced.values()), 0.002 * chunks, forced))
    for some in (measured, measured[:1]):
        results.write_text(json.dumps({"header": header, "rows": some}))
        draw("segments", results, picture)
        assert_picture(picture)
    results.write_text(json.dumps({"header": header, "rows": measured[1:2]}))
    draw("segments", results, picture, refusal="none of the rows")


def test_segments_on_the_gpu(run_python, has_gpu, refuses, tmp_path):
    script, output = ("-m", "bench.gpu.segments"), tmp_path / "segments.json"
    refuses(2, "no such row", script[1], "--only", "1/2")
    if not has_gpu:
        refuses(1, "needs a GPU", script[1], "--only", "2/8")
        pytest.skip(NO_GPU)
    said = run_python(*script, "--only", "2/8", "--seq", "1x2048", "--repeats", "2", "--output", str(output)).stdout
    assert "[1/1] 2/8 1x2048" in said and "1 shapes: worst regret" in said
    result = json.loads(output.read_text())
    assert {"gpu", "commit", "repeats"} <= result["header"].keys()
    (row,) = result["rows"]
    assert row["auto_ms"] > 0 and row["off_ms"] > 0 and {"8", "16"} <= row["forced"].keys()
    assert row["best_ms"] == min(row["off_ms"], *row["forced"].values())


def test_in_turns(run_python, has_gpu, refuses, tmp_path):
    from gatedelta import _lib

    script, output = ("-m", "bench.gpu.in_turns"), tmp_path / "in_turns.json"
    library = f"here={_lib.library_path('gatedelta')}"
    refuses(2, "no such row", script[1], library, "--only", "1/2")
    refuses(2, "no such peer: all; there are flashinfer and fla", script[1], library, "--peers", "all")
    if not has_gpu:
        refuses(1, "needs a GPU", script[1], library)
        pytest.skip(NO_GPU)
    run_python(*script, library, library.replace("here", "again"), "--kinds", "fwd,bwd,ragged",
               "--only", "2/8,2/4,6/18", "--seq", "1x2048,8k_1seq,ragged0", "--repeats", "2",
               "--output", str(output))  # fmt: skip
    result = json.loads(output.read_text())
    assert result["header"]["base"] == "here" and len(result["rows"]) == 3
    assert all(row["ms"].keys() == {"here", "again"} and row["distance"] == {"again": 0} for row in result["rows"])


def serving_row(batch: int = 1, tokens: int = 1, ms: float = 0.002, **more) -> dict:
    kind, store = ("decode", "final") if tokens == 1 else ("verify", "none")
    row = {"kind": kind, "hk": 16, "hv": 32, "batch": batch, "T": tokens, "state_dtype": "float32", "layout": "VK",
           "store": store, "ms": ms}  # fmt: skip
    return row | more


def test_serving_rows():
    from bench.lib import serving

    rows = serving.decode_rows() + serving.verify_rows()
    names = {serving.name_of(row) for row in rows}
    assert len(names) == len({serving.key(row) for row in rows}) == len(rows) == 220 + 164
    gpu, recorded = serving.load_recorded()
    assert gpu == "NVIDIA H200" and len(recorded) == 350
    assert recorded.keys() <= {serving.key(row) for row in rows}
    assert all(ms > 0 for times in recorded.values() for ms in times.values())
    for row in serving.pack_rows():
        assert min(row["lengths"]) > 0 and row["hv"] % row["hk"] == 0
    assert len(serving.pack_rows()) == 6 and serving.pack_rows() == serving.pack_rows()


def test_serving_bytes_and_chains():
    from bench.lib import serving

    mib = 1 << 20
    row = serving_row(tokens=4, batch=8, state_dtype="bfloat16")
    assert serving.state_bytes(row) == 8 * mib and serving.chain_length(row) == 24
    moved = {store: serving.moved_bytes(row | {"store": store}) // mib for store in serving.STORES}
    assert moved == {"steps": 40, "none": 8, "final": 16, "accept": 16}
    assert serving.chain_length(serving_row(hv=8)) == 256 and serving.chain_length(serving_row(512)) == 1


def test_serving_ratios():
    """A time of the same run counts, not the recorded one of the same peer."""
    from bench.lib import serving

    row = serving_row(peers={"fla": 0.004})
    recorded = {serving.key(row): {"fla": 0.001, "sglang": 0.003}}
    found = serving.compared(row, recorded)
    assert found["peers"] == {"fla": 0.004, "sglang (recorded)": 0.003} and found["speedup"] == pytest.approx(1.5)
    alone = serving.compared(row, {})
    assert alone["speedup"] == pytest.approx(2) and serving.compared(serving_row(), {}) == serving_row()
    assert serving.summary([found, alone, serving_row()]) == {
        "rows": 2, "geomean": pytest.approx(3**0.5), "worst": found, "recorded": 1,
    }  # fmt: skip
    assert serving.summary([serving_row()]) is None
    pack = {"kind": "pack", "hk": 8, "hv": 32, "seq": "64 x 1", "ms": 0.1, "peers": {"flashinfer": 0.2}}
    h100 = {"header": {"gpu": "NVIDIA H100"}, "rows": [pack, serving_row()]}
    joined, other = serving.with_peers(h100)
    assert joined["speedup"] == pytest.approx(2) and "peers" not in other


def test_serving_bars():
    from bench.lib import serving

    def verdicts(scale: float) -> dict[str, bool]:
        rows = [serving_row(1, ms=scale * 0.003, hot_ms=scale * 0.0025, peers={"fla": 0.0035})]
        rows += [serving_row(b, ms=scale * 0.0011 * b, peers={"fla": 0.0013 * b}) for b in serving.BATCHES[5:]]
        rows += [serving_row(32, 4, store=store, ms=scale * 0.04, peers={"fla": 0.06}) for store in serving.STORES]
        rows += [{"kind": "pack", "hk": 8, "hv": 32, "seq": "1 x 1", "ms": scale * 0.1, "peers": {"flashinfer": 0.15}}]
        rows = [serving.compared(row, {}) for row in rows]
        header = {"copy_bytes_per_s": 4e12, "decode_call_us": {"gatedelta": 10 * scale}}
        assert serving.report(header, rows).count("MISSED") == sum(
            not bar["passed"] for bar in serving.bars(header, rows)
        )
        return {bar["what"].partition(" (")[0]: bar["passed"] for bar in serving.bars(header, rows)}

    good, bad = verdicts(1.0), verdicts(1.6)
    assert good.keys() == bad.keys() and len(good) == 12
    assert all(good.values())
    assert {what for what, passed in bad.items() if passed} == {"T = 4 over T = 1, float32, batch 32 and more"}


def test_plots_of_serving(draw, tmp_path):
    results, folder = tmp_path / "decode.json", tmp_path / "pictures"
    header = {"gpu": "NVIDIA H200", "torch": "2.11", "gatedelta": "0.1.0"}
    rows = [serving_row(batch, peers={"fla 0.6.0": 0.003, "sglang packed decode": 1.0}) for batch in (1, 8)]
    rows += [serving_row(batch, 4) for batch in (1, 8)]
    results.write_text(json.dumps({"header": header, "rows": rows}))
    draw("serving", results, folder)
    assert_pictures(folder, {"decode-16x32.png", "verify-16x32.png"})
    results.write_text(json.dumps({"header": header | {"gpu": "NVIDIA H100"}, "rows": rows[2:]}))
    draw("serving", results, folder, refusal="no peer's time for any row")


def test_slots_of_a_chain():
    torch = pytest.importorskip("torch")
    from bench.lib import chain

    rows = chain.index_rows(3, 17, "cpu")
    assert rows.shape == (3, 32) and rows.dtype == torch.int32
    assert torch.equal(rows[:, :17].flatten(), torch.arange(51, dtype=torch.int32))
    assert torch.equal(chain.index_rows(3, 1, "cpu", 1), torch.arange(3, dtype=torch.int32)[:, None])


@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize("store", ["final", "steps", "none", "accept"])
def test_errors_of_decode(monkeypatch, store, layout):
    """What bench/gpu/decode.py calls is what it compares with, for every kind of row: here on the CPU."""
    pytest.importorskip("torch")
    from bench.gpu import decode

    monkeypatch.setattr(decode, "DEVICE", "cpu")
    for tokens, dtype, bound in ((1, "float32", 1e-6), (5, "float32", 1e-6), (3, "bfloat16", 3e-3)):
        if tokens == 1 and store != "final":
            continue
        row = serving_row(5, tokens, store=store, hk=2, hv=4, layout=layout, state_dtype=dtype)
        problem = decode.Problem(row, 2)
        others = problem.states(1).clone()
        call = decode.our_call(problem)
        errors = decode.errors_of(problem, call)
        assert errors.keys() == ({"err_o"} if store == "none" else {"err_o", "err_state"})
        assert 0 < errors["err_o"] < 3e-3 and errors.get("err_state", 0) < bound
        assert others.equal(problem.states(1))

        def wrong(node: int, problem=problem, call=call):
            o, states = call(node)
            (problem.states(node) if states is None else states)[0, 0] += 1
            return o, states

        if store != "none":
            assert decode.errors_of(problem, wrong)["err_state"] > 0.01


def test_errors_of_the_layers_step(monkeypatch):
    """What bench/gpu/layer_step.py calls is what it compares with: here on the CPU."""
    pytest.importorskip("torch")
    from bench.gpu import decode, layer_step

    monkeypatch.setattr(decode, "DEVICE", "cpu")
    for row in layer_step.rows_of((3,)):
        problem = layer_step.Problem(row | {"hk": 2, "hv": 4}, 2)
        others = problem.states(1).clone()
        errors = layer_step.errors_of(problem, layer_step.our_calls(problem)["step"])
        assert 0 < errors["err_o"] < 4.5e-3 and errors["err_state"] < 4.5e-3
        assert others.equal(problem.states(1))


def test_rows_that_share_kernels_are_compiled_together():
    pytest.importorskip("torch")
    from bench.gpu import decode

    rows = [serving_row(b, t) for t in (1, 2) for b in (1, 8)]
    assert decode.compiled_together(rows) == [rows[:2], rows[2:]]


def test_missing_peers_are_named(run_python):
    """Packages that cannot be imported are said, and left out."""
    pytest.importorskip("torch")
    code = (
        "import sys\n"
        "for name in ('fla', 'flashinfer', 'sglang'): sys.modules[name] = None\n"
        "from bench import peers; print(peers.importable())"
    )
    *said, found = run_python("-c", code).stdout.splitlines()
    assert found == "[]" and [line.split()[2] for line in said] == ["fla_triton", "flashinfer_cute", "sglang_triton"]


@pytest.mark.parametrize("script", ["decode", "packs"])
def test_serving_on_the_gpu(run_python, has_gpu, refuses, tmp_path, script):
    path, output = ("-m", f"bench.gpu.{script}"), tmp_path / "rows.json"
    if not has_gpu:
        refuses(1, "needs a GPU", path[1])
        pytest.skip(NO_GPU)
    refuses(2, "no such row", path[1], "--only", "3/5")
    some = ["--only", "2/8", "--batch", "8"] if script == "decode" else ["--only", "8/32"]
    run_python(*path, *some, "--peers", "none", "--repeats", "2", "--output", str(output))
    result = json.loads(output.read_text())
    assert {"gpu", "commit", "repeats", "seconds"} <= result["header"].keys()
    assert len(result["rows"]) == (10 if script == "decode" else 1)
    assert all(row["ms"] > 0 and 0 < row["err_o"] < 1e-2 for row in result["rows"])


# For models so small that more threads mostly wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def models(run_python, root, tmp_path_factory):
    """What bench/gpu/models.py writes of tiny models on a CPU."""
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    output = tmp_path_factory.mktemp("models") / "models.json"
    ours = ["gatedelta", "gatedelta-fused"] if (root / "python" / "gatedelta" / "transformers").exists() else []
    paths = [*ours, "torch"]
    run_python("-m", "bench.gpu.models", "--smoke", "--paths", *paths, "--output", str(output), env=ONE_THREAD)
    return json.loads(output.read_text()), paths


def test_models_are_timed(models):
    from bench.lib import model_rows

    result, paths = models
    header, rows = result["header"], result["rows"]
    assert list(header["paths"]) == paths and "incomplete" not in header
    expected = {path: ("decode",) if path == "gatedelta-fused" else model_rows.KINDS for path in paths}
    expected = [(path, row) for path, kinds in expected.items() for row in model_rows.rows_of(True, ["tiny"], kinds)]
    assert [(row["path"], model_rows.key(row)) for row in rows] == [(p, model_rows.key(row)) for p, row in expected]
    for row in rows:
        if row["mode"] == "graph":
            assert row["skipped"] == "no GPU"
        else:
            assert 0 < row["gdn_ms"] < row["ms"], row
            assert 1 <= row["runs"] <= (5 if row["kind"] == "decode" else 1), row  # slow rows have fewer
    if "gatedelta" in paths:
        assert all(0 < header["logits_distance"]["tiny"][path] < 2e-2 for path in paths if path != "torch")


def test_models_can_be_added(models, run_python, tmp_path):
    """A path again, with one kind: its rows of other kinds and the other paths' rows stay."""
    before, _ = models
    output = tmp_path / "models.json"
    output.write_text(json.dumps(before))
    script = ("-m", "bench.gpu.models")
    options = ("--smoke", "--append", "--paths", "torch", "--kinds", "train", "--output", str(output))
    run_python(*script, *options, env=ONE_THREAD)
    after = json.loads(output.read_text())
    again = [row for row in before["rows"] if row["path"] == "torch" and row["kind"] == "train"]
    assert after["rows"][:-1] == [row for row in before["rows"] if row not in again]
    assert len(again) == 1 and after["rows"][-1]["ms"] != again[0]["ms"]
    assert [(run["paths"], run["kinds"]) for run in after["header"]["added"]] == [(["torch"], ["train"])]


def test_models_warm_up(run_python, tmp_path):
    """What the processes that compile run, on a CPU; and which configurations each would compile."""
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    pytest.importorskip("triton")
    code = (
        "import triton\n"
        "from bench.lib import model_calls, model_rows\n"
        "model_calls.compile_share(1, 4)\n"
        "@triton.autotune([triton.Config({'B': b}) for b in range(6)], key=[])\n"
        "@triton.jit\n"
        "def kernel(x, B: triton.language.constexpr):\n"
        "    pass\n"
        "print([config.kwargs['B'] for config in kernel.configs])\n"
        "model_calls.choose_path('gatedelta')\n"
        "rows = [{'kind': 'prefill', 'tokens': 20, 'batch': 1}, {'kind': 'decode', 'tokens': 20, 'batch': 1},\n"
        "        {'kind': 'train', 'lengths': [9, 4]}]\n"
        "assert [row.keys() for row in rows] == [row.keys() for row in model_rows.COMPILED]\n"
        "model_calls.call_everything(model_rows.SMOKE_SIZES['tiny'], 64, rows, 'cpu')\n"
    )
    script = tmp_path / "warm_up.py"  # Triton reads the source of a kernel
    script.write_text(code)
    assert run_python(str(script), env=ONE_THREAD).stdout.strip() == "[1, 5]"


def test_models_refuse_what_cannot_run(run_python, tmp_path):
    script, output = ("-m", "bench.gpu.models"), str(tmp_path / "models.json")
    refused = run_python(*script, "--smoke", "--sizes", "4B", "--output", output, check=False)
    assert refused.returncode == 2 and "there is no size 4B; there are tiny" in refused.stderr
    refused = run_python(*script, check=False)
    assert refused.returncode == 2 and "there is no --output" in refused.stderr


def model_results() -> dict:
    """Made-up times: GateDelta is twice as fast as FLA, and FLA cannot do the longest prefill."""
    from bench.lib import model_rows

    rows = []
    for path, factor in (("gatedelta", 1), ("fla", 2), ("fla-all", 1.5), ("torch", 10)):
        for i, row in enumerate(model_rows.rows_of(False, list(model_rows.SIZES), model_rows.KINDS)):
            if path != "gatedelta" and row["tokens"] == 131072:
                rows.append(row | {"path": path, "skipped": "out of memory"})
            else:
                times = {"ms": factor * (i + 1.0), "gdn_ms": factor * factor * 0.5, "runs": 3}
                rows.append(row | {"path": path, "peak_bytes": int(factor * 2**33)} | times)
    header = {"gpu": "NVIDIA H200", "torch": "2.11", "gatedelta": "1.0", "transformers": "5.17.0", "vocabulary": 32768,
              "commit": "0123456789abcdef", "modified": False, "date": "2026-01-02",
              "paths": {"gatedelta": {}, "fla": {"fla": "0.6.0"}}}  # fmt: skip
    return {"header": header, "rows": rows}


def fused_rows(rows: list[dict]) -> list[dict]:
    """Made-up times of the path that only decodes: three quarters of GateDelta's, and half in the layers."""
    decoded = [row for row in rows if row["path"] == "gatedelta" and row["kind"] == "decode"]
    return [row | {"path": "gatedelta-fused", "ms": 0.75 * row["ms"], "gdn_ms": 0.25} for row in decoded]


def test_plot_of_models(draw, tmp_path):
    results, picture = tmp_path / "models.json", tmp_path / "pictures" / "models.png"
    results.write_text(json.dumps(model_results()))
    draw("models", results, picture)
    assert_picture(picture)
    size = picture.stat().st_size
    result = model_results()
    results.write_text(json.dumps(result | {"rows": result["rows"] + fused_rows(result["rows"])}))
    draw("models", results, picture)
    assert picture.stat().st_size > size
    results.write_text(json.dumps(model_results() | {"rows": []}))
    draw("models", results, picture, refusal="no time of GateDelta's path")


def test_table_of_models(monkeypatch, tmp_path):
    from bench.report import record, render
    from bench.report.tables import files

    for module in (record, files):
        monkeypatch.setattr(module, "H200", tmp_path / "h200")
    block = "<!-- results: models -->\n<!-- /results -->"
    assert render.rendered(f"before\n{block}\nafter\n") == f"before\n{block}\nafter\n"
    results = tmp_path / "some.json"
    results.write_text(json.dumps(model_results()))
    results.with_suffix(".png").write_bytes(PNG)
    record.record_models(results)
    text = render.rendered(block)
    assert "| 4B, prefill, 32k tokens | 12.0 (0.500) | 24.0 (2.00) | 120 (50.0) | 18.0 (1.12) | 1.50× | 2.25× |" in text
    assert "| 10.00× | 8.0 / 16.0 / 80.0 / 12.0 |" in text and "(../results/h200/models.png)" in text
    assert "| 4B, prefill, 128k tokens | 13.0 (0.500) | — | — | — |  |  |  | 8.0 / — / — / — |" in text
    assert "Not measured: FLA with its convolution and norm, 0.8B, prefill, 128k tokens: out of memory; " in text
    assert "transformers 5.17.0 with FLA 0.6.0" in text and text.count("\n| ") == 2 + 2 * 10
    assert "fused" not in text

    result = model_results()
    result["rows"] = fused_rows(result["rows"]) + result["rows"]
    results.write_text(json.dumps(result))
    record.record_models(results)
    text = render.rendered(block)
    assert "| GateDelta | GateDelta, projections fused | FLA | torch code |" in text
    assert "| 0.8B, decode, batch 1 | 4.00 (0.500) | 3.00 (0.250) | 8.00 (2.00) | 40.0 (50.0) | 6.00 (1.12) |" in text
    assert "| 4B, prefill, 32k tokens | 12.0 (0.500) |  | 24.0 (2.00) |" in text
    assert "fuse_projections`." in text and text.count("\n| ") == 2 + 2 * 10

    for edit, reason in (({"gpu": "NVIDIA H100"}, "not from an H200"), ({}, "no time of GateDelta's path")):
        result = model_results()
        result["header"] |= edit
        result["rows"] = [row for row in result["rows"] if edit or row["path"] != "gatedelta"]
        results.write_text(json.dumps(result))
        with pytest.raises(SystemExit, match=reason):
            record.record_models(results)
