"""The benchmark scripts run, and what they write is complete; the plots can be drawn. Times are not judged here."""

from __future__ import annotations

import json

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
    import subprocess

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
