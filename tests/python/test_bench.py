"""The benchmark scripts run, and what they write is complete; the plots can be drawn. Times are not judged here."""

from __future__ import annotations

import json
import subprocess

import pytest


@pytest.fixture(scope="module")
def comparison(run_python, root, tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    output = tmp_path_factory.mktemp("bench") / "cpu.json"
    script = root / "bench" / "cpu_vs_transformers.py"
    result = run_python(str(script), "--smoke", "--repeats", "1", "--output", str(output))
    assert "error against the fp64 recurrence" in result.stdout
    return output


def test_comparison_is_complete(comparison):
    result = json.loads(comparison.read_text())
    assert {"machine", "versions", "shapes", "decode", "scaling", "errors", "bars"} <= result.keys()
    for shape in result["shapes"]:
        for kind in ("forward", "forward+backward"):
            assert shape[kind]["ours"]["best_ms"] > 0 and shape[kind]["theirs"]["best_ms"] > 0
        assert shape["forward"]["share_of_matmul"] > 0
    assert {s["threads"] for s in result["scaling"]} >= {1}
    # transformers computes in fp32 and rounds to bf16 once; a side that computed something else would show here.
    assert all(0 < e["theirs"] < 3e-3 for e in result["errors"])
    assert all(0 < e["ours"] < 2e-2 for e in result["errors"])


def test_bars_are_judged(root, run_python, comparison):
    """judge() on made-up speeds: each bar can be passed and missed."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(root / 'bench')!r})\n"
        "import cpu_vs_transformers as bench\n"
        f"result = json.load(open({str(comparison)!r}))\n"
        "def verdicts(speed, share):\n"
        "    for shape in result['shapes']:\n"
        "        for kind in ('forward', 'forward+backward'): shape[kind]['speedup'] = speed\n"
        "        shape['forward']['share_of_matmul'] = share\n"
        "    result['decode']['speedup'] = speed\n"
        "    return [bar['passed'] for bar in bench.judge(result)]\n"
        "print(verdicts(5.5, 0.44), verdicts(20, 0.45))"
    )
    expected = "[True, False, True, False, False, False] [True, True, True, True, True, True]"
    assert run_python("-c", code).stdout.strip() == expected


def test_plot_of_the_comparison(run_python, root, comparison, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "cpu.png"
    run_python(str(root / "bench" / "plot.py"), str(comparison), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


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


def test_plot_of_a_run(run_python, root, tmp_path):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "run.json", tmp_path / "pictures" / "run.png"
    results.write_text(json.dumps(RUN))
    run_python(str(root / "bench" / "plot.py"), str(results), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    results.write_text(json.dumps({"command": "something else"}))
    refused = run_python(str(root / "bench" / "plot.py"), str(results), str(picture), check=False)
    assert refused.returncode == 2 and "something else" in refused.stderr


def test_plot_of_what_the_tool_writes(run_python, root, tmp_path):
    """The command line tool and the plot agree on the format."""
    pytest.importorskip("matplotlib")
    import tree

    tool = tree.BUILD / "cli" / "gatedelta"
    if not tool.exists():
        pytest.skip("the command line tool is not built")
    results, picture = tmp_path / "run.json", tmp_path / "run.png"
    subprocess.run(
        [tool, "run", "--tokens", "128", "--seconds", "0.01", "--verify", "1", "--json", results],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    run_python(str(root / "bench" / "plot.py"), str(results), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def bench(monkeypatch, root):
    monkeypatch.syspath_prepend(str(root / "bench"))


def gpu_row(hv: int, seq: str, ms: float, **more) -> dict:
    return {"kind": "fwd", "hk": hv // 4, "hv": hv, "seq": seq, "ms": ms, **more}


def test_peers_have_every_row(bench):
    import ratios
    import rows

    gpu, peers = ratios.load_peers()
    assert gpu == "NVIDIA H200"
    assert set(peers) == {ratios.key(row) for row in rows.forward_rows()} and len(peers) == 171
    assert all(ms > 0 for times in peers.values() for ms in times.values())


def test_ratios(bench):
    import ratios

    peers = {("fwd", 16, 64, "8192x4"): {"slow": 3.0, "fast": 1.0}, ("fwd", 2, 8, "8192x4"): {"fast": 1.0}}
    rows = [gpu_row(64, "8192x4", 0.5), gpu_row(8, "8192x4", 2.0), gpu_row(8, "1x2048", 1.0)]
    found = [ratios.compared(row, peers) for row in rows]
    assert [row.get("speedup") for row in found] == [2.0, 0.5, None]
    assert found[0]["best_peer_ms"] == 1.0 and ratios.best_peer(found[0]) == "fast"
    assert ratios.summary(found) == {"rows": 2, "geomean": pytest.approx(1), "worst": found[1]}
    assert ratios.summary(found[2:]) is None


def test_rows_that_fill_the_gpu(bench):
    import ratios
    import rows

    assert ratios.is_full(gpu_row(64, "1x2048", 1.0)) and ratios.is_full(gpu_row(32, "4096+4096", 1.0))
    assert not ratios.is_full(gpu_row(32, "1x32768", 1.0)) and not ratios.is_full(gpu_row(8, "8192x4", 1.0))
    assert sum(map(ratios.is_full, rows.forward_rows())) == 89


NCU_LOG = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
"","","us","%"
"0","void gatedelta::cuda::prepare_kernel<__nv_bfloat16>(ForwardParams)","125.50","n/a"
"1","gatedelta::cuda::schedule_kernel(gatedelta::cuda::ForwardParams)","8.25","0.00"
"2","void gatedelta::cuda::forward_kernel<__nv_bfloat16>(ForwardParams)","1,522.46","66.60"
"""


@pytest.mark.parametrize("unit, factor", [("ns", 1e-3), ("us", 1), ("msecond", 1e3)])
def test_profile_is_read(bench, unit, factor):
    import ncu

    assert ncu.parse(NCU_LOG.replace('"us"', f'"{unit}"')) == {
        "prepare_kernel": {"duration_us": pytest.approx(125.5 * factor)},
        "schedule_kernel": {"duration_us": pytest.approx(8.25 * factor), "tensor_pct": 0.0},
        "forward_kernel": {"duration_us": pytest.approx(1522.46 * factor), "tensor_pct": 66.6},
    }


def test_profile_of_a_command(bench, tmp_path):
    import ncu

    tool, log = tmp_path / "ncu", tmp_path / "said"
    log.write_text(NCU_LOG)
    find_log = 'while [ "$1" != --log-file ]; do shift; done'
    tool.write_text(f'#!/bin/sh\n{find_log}\ncp {log} "$2"\n')
    tool.chmod(0o755)
    assert set(ncu.profile(str(tool), ["true"])) == set(ncu.KERNELS)
    log.write_text("==ERROR== no permission\n")
    with pytest.raises(RuntimeError, match="no permission"):
        ncu.profile(str(tool), ["true"])


def test_plots_of_gpu_rows(run_python, root, tmp_path):
    pytest.importorskip("matplotlib")
    results, folder = tmp_path / "h200.json", tmp_path / "pictures"
    header = {"gpu": "NVIDIA H200", "torch": "2.11", "gatedelta": "0.1.0"}
    rows = [gpu_row(hv, seq, 0.5, peers={"fla 1": 0.6, "other published": ms}, speedup=min(0.6, ms) / 0.5)
            for hv in (8, 64) for seq, ms in (("1x2048", 0.3), ("8192x4", 2.0))]  # fmt: skip
    results.write_text(json.dumps({"header": header, "rows": rows}))
    script = str(root / "bench" / "plot_gpu.py")
    run_python(script, str(results), str(folder))
    assert {path.name for path in folder.iterdir()} == {"2x8.png", "16x64.png", "overview.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    results.write_text(json.dumps({"header": header, "rows": [gpu_row(8, "1x2048", 1.0)]}))
    refused = run_python(script, str(results), str(folder), check=False)
    assert refused.returncode == 2 and "no row with peers' times" in refused.stderr


def test_gpu_rows(run_python, root, tmp_path):
    torch = pytest.importorskip("torch")
    import gatedelta

    if not torch.cuda.is_available() or gatedelta.info()["cuda_devices"] == 0:
        pytest.skip("no GPU, or none that is supported")
    output, kernels = tmp_path / "h200.json", tmp_path / "kernels.json"
    kernels.write_text('{"k": {"digest": "0"}}')
    run_python(str(root / "bench" / "gpu.py"), "--only", "2/8", "--seq", "1x2048", "--repeats", "2",
               "--kernels", str(kernels), "--output", str(output))  # fmt: skip
    result = json.loads(output.read_text())
    assert {"gpu", "driver", "torch", "date", "commit", "eager_call_us"} <= result["header"].keys()
    assert result["header"]["kernels"] == {"k": {"digest": "0"}}
    (row,) = result["rows"]
    assert row["ms"] > 0 and 0 < row["err_o"] < 1e-2 and 0 < row["err_state"] < 1e-2
