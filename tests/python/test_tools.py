"""The gates must be able to fail: each is shown something good and something bad."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(tool: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOLS / tool, *map(str, arguments)], capture_output=True, text=True)


def report(path: Path, cases: str) -> Path:
    path.write_text(f"<testsuite>{cases}</testsuite>")
    return path


PASSED = '<testcase name="a" classname="a" status="run"/>'
SKIPPED = """<testcase name="b" classname="b" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>x.cpp:4: Skipped
no GPU
[  SKIPPED ] b</system-out></testcase>"""
FAILED = '<testcase name="c" classname="m"><failure message="x"/></testcase>'


def test_sum_counts_and_names(tmp_path):
    result = run("sum_reports.py", f"C++={report(tmp_path / 'r.xml', PASSED + SKIPPED)}")
    assert result.returncode == 0
    assert "skipped, no GPU:\n  b\n" in result.stdout
    assert result.stdout.splitlines()[-1] == "total  1 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize("cases", [PASSED + FAILED, ""])
def test_sum_fails_on_failure_and_on_emptiness(tmp_path, cases):
    assert run("sum_reports.py", f"C++={report(tmp_path / 'r.xml', cases)}").returncode == 1


def test_sum_fails_without_a_report(tmp_path):
    assert run("sum_reports.py", f"C++={tmp_path / 'none.xml'}").returncode == 1


SHARED = "template <class T> __attribute__((noinline)) T twice(T x) { return x + x; }\n"
OWN = "namespace gatedelta::cpu::avx2 { struct S { int v; S operator+(S o) const { return {v + o.v}; } }; %s }\n"


@pytest.mark.parametrize(
    "source, good",
    [
        (OWN % "int f(int x) { return x; }", True),
        (SHARED + OWN % "int f(int x) { return twice(S{x}).v; }", True),  # instantiated with a type of its own
        (SHARED + OWN % "int f(int x) { return twice(x); }", False),  # the linker could keep this copy for everybody
        ("int f(int x) { return x; }", False),
    ],
)
def test_isa_symbols(tmp_path, source, good):
    folder = tmp_path / "src/cpu/isa"
    folder.mkdir(parents=True)
    (tmp_path / "avx2.cpp").write_text(source)
    subprocess.run(["c++", "-std=c++20", "-O2", "-c", tmp_path / "avx2.cpp", "-o", folder / "avx2.cpp.o"], check=True)
    assert (run("check_isa_symbols.py", tmp_path).returncode == 0) == good


def test_isa_symbols_fails_without_objects(tmp_path):
    assert run("check_isa_symbols.py", tmp_path).returncode == 1


@pytest.mark.parametrize(
    "name, text, good",
    [
        ("a.md", "See [b](b.md).\n", False),
        ("a.md", "See [us](README.md).\n", True),
        ("a.md", "See [the words](CONTRIBUTING.md#words-we-use).\n", True),
        ("a.md", "See [no words](CONTRIBUTING.md#words).\n", False),
        ("a.md", "# Some `words`, here\n\nSee [above](#some-words-here).\n", True),
        ("a.md", "# Some words\n\nSee [above](#words).\n", False),
        ("a.md", "The map is `src/cuda/README.md`, in `src/cuda`; each `src/cpu/isa/<isa>.cpp` is short.\n", True),
        ("a.md", "The map is `src/cuda/MAP.md`.\n", False),
        ("docs/experiments/a.md", "Tried in `src/cuda/no_such.cuh`.\n", True),
        ("a.py", "path = '/" + "home/me/x'\n", False),
        ("a.py", "x = 1 \n", False),
        ("a.py", "x = 1", False),
        ("a.cpp", "// " + "x" * 120 + "\n", False),
        ("a.cpp", "int x;\n", True),
        ("a.csv", "x," * 100 + "x\n", True),
    ],
)
def test_texts(name, text, good):
    import check_texts

    assert (not list(check_texts.problems_of(Path(name), text))) == good


def test_the_map_has_every_page(root):
    """docs/README.md leads to every document, the integrations and experiments by their own lists."""
    docs = root / "docs"
    linked = set()
    for page in (docs / "README.md", docs / "integrations.md", docs / "experiments/README.md"):
        links = re.findall(r"\]\(([^)#]+\.md)", page.read_text())
        linked |= {(page.parent / link).resolve() for link in links}
    assert {page for page in docs.rglob("*.md") if page != docs / "README.md"} <= linked


def test_every_kernel_page_says_how_to_change_it(root):
    for page in (root / "docs/kernels").glob("*.md"):
        rows = page.read_text().partition("## Changing it")[2]
        assert all(
            f"| {what}" in rows for what in ("files |", "tests without a GPU |", "tests with one |", "compare |")
        ), page


def retired_words() -> list:
    import check_texts

    return check_texts.retired_words()


@pytest.mark.parametrize("word", retired_words(), ids=lambda word: word.pattern.pattern)
def test_every_retired_word_is_found(word):
    """In its places, and only there."""
    import check_texts

    def found(path: str) -> str:
        return "\n".join(check_texts.words_of(Path(path), f"one line\n{word.example}\nanother\n"))

    for place in word.places or ("README.md",):
        path = place if Path(place).suffix or place == "Makefile" else f"{place}/a.hpp"
        assert f"{path}:2: " in found(path) and f"use {word.replacement}" in found(path)
    assert not word.places or word.replacement not in found("examples/a.hpp")
    for path in ("CHANGELOG.md", "docs/experiments.md", "docs/experiments/decode.md", "results/SCHEMA.md"):
        assert found(path) == ""


@pytest.mark.parametrize(
    "line",
    [
        "values near 1, near the bound, the nearest even number",
        "// Walks over tokens; the CPU's step_kv follows the step before.",
        "gd_add_isa(neon_bf16 -march=armv8.2-a+bf16)",
        "(f(args), ...);  // a fold expression",
        "the folder of tensor maps, a map of the tree; dict(map(str, entries))",
        "each entry of a state pool is kept; all multiprocessors",
    ],
)
def test_ordinary_english_is_no_retired_word(line):
    import check_texts

    for path in ("src/cuda/a.cuh", "docs/kernels/a.md", "tests/cpp/a.cpp", "python/a.py"):
        assert not list(check_texts.words_of(Path(path), line))


@pytest.mark.parametrize("path, lines, good", [
    ("src/a/b.cuh", 500, True), ("src/a/b.cuh", 501, False), ("bindings/torch/a.cpp", 501, False),
    ("python/gatedelta/a.py", 501, False), ("tests/cpp/a.cpp", 501, True),
])  # fmt: skip
def test_files_of_the_product_stay_short(path, lines, good):
    import check_texts

    assert (not list(check_texts.problems_of(Path(path), "x\n" * lines))) == good


KERNEL = """ptxas info    : Function properties for _Z1kv
    %s bytes stack frame, %s bytes spill stores, %s bytes spill loads
"""


@pytest.mark.parametrize(
    "text, problems",
    [
        (KERNEL % (0, 0, 0), []),
        (KERNEL % (0, 0, 0) + KERNEL % (8, 4, 12), ["_Z1kv: 8 bytes stack frame"]),
        (KERNEL % (16, 0, 0), ["_Z1kv: 16 bytes stack frame"]),
        (KERNEL % (0, 0, 4), ["_Z1kv: 0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads"]),
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma serialized\n" + KERNEL % (0, 0, 0), ["(C7510)"]),
        ("ptxas info    : (C7514) something new\n" + KERNEL % (0, 0, 0), ["(C7514)"]),
        ("ptxas info    : 0 bytes gmem\n", ["nothing was checked"]),
        ("", ["nothing was checked"]),
    ],
)
def test_nvcc_output(text, problems):
    import nvcc_checked

    found = nvcc_checked.problems_of(text)
    assert len(found) == len(problems) and all(part in line for part, line in zip(problems, found))


@pytest.mark.parametrize("spilled, good", [(0, True), (4, False)])
def test_nvcc_failure_leaves_no_object(tmp_path, spilled, good):
    text = KERNEL % (0, spilled, spilled)
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/k.o\nprintf '%s' '{text}a warning\n' >&2\n")
    compiler.chmod(0o755)
    result = run("nvcc_checked.py", compiler, "-c", "k.cu", "-o", tmp_path / "k.o")
    assert (result.returncode == 0) == good and (tmp_path / "k.o").exists() == good
    assert "a warning" in result.stdout and ("spill" in result.stdout) != good


def test_nvcc_error_is_passed_on():
    assert run("nvcc_checked.py", "false", "-o", "k.o").returncode == 1


PORTABLE = ("prepare", "forward", "states", "grad_chain", "gradients")


def sass_kernels(**changes: dict[str, int]):
    """What sass.py finds in a good library, with other opcode counts for some kernels."""
    import sass

    counts = {"forward_kernel<bf16, 2>": {"HGMMA": 44, "UTMALDG": 6, "UTMASTG": 2, "LDL": 0, "STL": 0},
              "prepare_kernel<bf16>": {"HGMMA": 8, "HMMA": 40, "LDL": 0, "STL": 0},
              "states_kernel<bf16>": {"HGMMA": 40, "UTMALDG": 4, "LDL": 0, "STL": 0},
              "backward_chain_kernel<bf16>": {"HGMMA": 56, "UTMALDG": 4, "UTMASTG": 2, "LDL": 0, "STL": 0},
              "gradients_kernel<bf16>": {"HGMMA": 112, "UTMALDG": 10, "LDL": 0, "STL": 0},
              "portable_prepare_kernel<64>": {"HMMA": 40, "LDSM": 19, "LDGSTS": 8, "LDL": 0, "STL": 0},
              "portable_forward_kernel<64>": {"HMMA": 60, "LDSM": 32, "LDGSTS": 16, "LDL": 0, "STL": 0},
              "fp32_loop_kernel<64>": {"LDGSTS": 16, "LDL": 0, "STL": 0},
              "portable_states_kernel<64>": {"HMMA": 40, "LDSM": 24, "LDGSTS": 14, "LDL": 0, "STL": 0},
              "portable_grad_chain_kernel<64>": {"HMMA": 60, "LDSM": 40, "LDGSTS": 16, "LDL": 0, "STL": 0},
              "portable_gradients_kernel<64>": {"HMMA": 90, "LDSM": 60, "LDGSTS": 20, "LDL": 0, "STL": 0}}  # fmt: skip
    return {
        name: sass.Kernel(name[0] * 16, 128, 100, census | changes.get(name[:7], {})) for name, census in counts.items()
    }


@pytest.mark.parametrize(
    "changes, problems",
    [
        ({}, []),
        ({"forward": {"LDL": 3}}, ["forward_kernel<bf16, 2>: 3 LDL"]),
        ({"prepare": {"STL": 1}}, ["prepare_kernel<bf16>: 1 STL"]),
        ({"forward": {"HGMMA": 0}}, ["forward_kernel<bf16, 2>: no HGMMA"]),
        ({"forward": {"UTMALDG": 0, "UTMASTG": 0}}, ["no UTMALDG", "no UTMASTG"]),
        ({"prepare": {"HGMMA": 0}}, ["prepare_kernel<bf16>: no HGMMA"]),
        ({"prepare": {"HMMA": 0}}, ["prepare_kernel<bf16>: no HMMA"]),
        ({"states_": {"UTMALDG": 0}}, ["states_kernel<bf16>: no UTMALDG"]),
        ({"backwar": {"UTMASTG": 0}}, ["backward_chain_kernel<bf16>: no UTMASTG"]),
        ({"gradien": {"HGMMA": 0}}, ["gradients_kernel<bf16>: no HGMMA"]),
        ({"fp32_lo": {"LDGSTS": 0}}, ["fp32_loop_kernel<64>: no LDGSTS"]),
        ({"portabl": {"LDGSTS": 0}}, [f"portable_{name}_kernel<64>: no LDGSTS" for name in PORTABLE]),
    ],
)
def test_sass_rules(changes, problems):
    import sass

    found = sass.problems_of(sass_kernels(**changes))
    assert len(found) == len(problems) and all(part in line for part, line in zip(problems, found))


def test_sass_rules_must_meet_their_kernels():
    import sass

    assert len(sass.problems_of({})) == len(sass.REQUIRED)
    kernels = sass_kernels()
    kernels["renamed_kernel"] = kernels.pop("prepare_kernel<bf16>")
    assert sass.problems_of(kernels) == ["prepare_kernel: there is no such kernel, so nothing was checked"]


@pytest.mark.parametrize(
    "record, forward, prepare",
    [
        (None, "f" * 16, "p" * 16),
        ({}, "not in the record", "not in the record"),
        ({"forward_kernel<bf16, 2>": {"digest": "f" * 16}}, "recorded", "not in the record"),
        ({"prepare_kernel<bf16>": {"digest": "q" * 16}}, "not in the record", "changed since"),
        ({"another_name<bf16>": {"digest": "p" * 16}}, "not in the record", "recorded"),
    ],
)
def test_sass_comparison_tells_and_never_fails(monkeypatch, capsys, tmp_path, record, forward, prepare):
    import sass

    path = tmp_path / "record.json"
    if record is not None:
        path.write_text(json.dumps({"header": {"kernels": record}}))
    monkeypatch.setattr(sass, "kernels_of", lambda library, architecture=90: sass_kernels())
    monkeypatch.setattr(sass, "other_architectures", lambda library: [80])
    monkeypatch.setattr(sys, "argv", ["sass.py", __file__, "--compare", str(path), "--json", str(tmp_path / "k.json")])
    assert sass.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("sass:")]
    assert len(lines) == 11 and lines[0].endswith(f", {forward}") and lines[1].endswith(f", {prepare}")
    assert json.loads((tmp_path / "k.json").read_text())["prepare_kernel<bf16>"]["digest"] == "p" * 16


NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CU = """namespace n {
template <class T, int N> __global__ void sine(T* p) { p[threadIdx.x] = __sinf(p[threadIdx.x + N]); }
template __global__ void sine<float, 1>(float*);
template __global__ void sine<float, 2>(float*);
}
__global__ void local(int* p, int n) {
  int x[64];
  for (int i = 0; i < 64; i++) x[i * n & 63] = p[i];
  p[0] = x[n];
}
"""


@pytest.mark.skipif(not NVCC, reason="no nvcc")
@pytest.mark.parametrize("flag", ["-O3", "-compress-mode=size"])
def test_sass_of_an_object(tmp_path, flag):
    """As nvcc leaves machine code, and compressed as in the library."""
    import sass

    if flag != "-O3" and "compress-mode" not in subprocess.run([NVCC, "--help"], capture_output=True, text=True).stdout:
        pytest.skip("this nvcc cannot compress so")

    (tmp_path / "k.cu").write_text(CU)
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90a")]
    subprocess.run([NVCC, flag, *code, "-c", tmp_path / "k.cu", "-o", tmp_path / "k.o"], check=True)
    kernels = sass.kernels_of((tmp_path / "k.o").read_bytes())
    assert list(kernels) == ["local", "sine<float, 1>", "sine<float, 2>"]
    assert kernels["local"].census["LDL"] > 0 and kernels["local"].census["STL"] > 0
    assert all(8 <= kernel.registers < 256 for kernel in kernels.values())
    first, second = kernels["sine<float, 1>"], kernels["sine<float, 2>"]
    assert first.census["MUFU"] == 1 and first.census["LDL"] == 0 and first.instructions >= 8
    assert first.digest != second.digest
    library = (tmp_path / "k.o").read_bytes()
    assert sass.other_architectures(library) == [80]
    assert sass.kernels_of(library, 80)["local"].census["STL"] > 0
    output = run("sass.py", tmp_path / "k.o").stdout
    assert "sass: sm_80 local: " in output and "sm_80 portable_forward_kernel: there is no such kernel" in output
    if flag != "-O3":
        assert sass.ZSTD in library
        for spoilt, problem in ((bytes(12), "not a zstd frame"), (sass.ZSTD + bytes(12), "zstd frame")):
            with pytest.raises(ValueError, match=problem):
                sass.decompressed(spoilt)


def test_sass_fails_without_kernels():
    assert "not a 64-bit ELF file" in run("sass.py", __file__).stdout
    result = run("sass.py", sys.executable)
    assert result.returncode == 1 and "there is no such kernel" in result.stdout


@pytest.fixture
def results(monkeypatch, tmp_path) -> Path:
    """An empty results/h200 for both tools."""
    from bench.report import record
    from bench.report.tables import files

    for module in (record, files):
        monkeypatch.setattr(module, "H200", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def bench_folder(tmp_path) -> Path:
    """What `make bench-gpu` leaves, with made-up times: twice as fast as the best peer, half as fast in two rows."""
    from bench.lib import ratios
    from bench.lib.rows import ERRORS, KINDS, name_of

    header = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "repeats": 15, "date": "2026-01-02",
              "commit": "0123456789abcdef", "modified": False, "sm_clock_mhz": 1755, "sm_clock_max_mhz": 1980,
              "kernels": {"forward_kernel": {"digest": "0"}},
              "profile": {"16/64 8192x4": {"forward_kernel": {"duration_us": 510.0, "tensor_pct": 66.4}}}}  # fmt: skip
    _, peers = ratios.load_peers()
    more = {"fwd": {}, "bwd": {"train_ms": 4.0, "workspace_bytes": 1500 * 2**20, "saved_bytes": 2**19,
                               "small_ms": 3.0, "small_workspace_bytes": 2**30}}  # fmt: skip
    rows = []
    for row in (row for every in KINDS.values() for row in every()):
        del row["lengths"]
        speedup = 0.5 if name_of(row) in ("2/8 1x2048", "2/4 8k_2seq") else 2
        ms = min(ratios.measured(peers[ratios.key(row)]).values()) / speedup
        errors = {name: 3e-3 - 1e-4 * i for i, name in enumerate(ERRORS[row["kind"]])}
        rows.append(row | {"ms": ms} | more[row["kind"]] | errors)
    folder = tmp_path / "bench"
    (folder / "h200").mkdir(parents=True)
    (folder / "h200.json").write_text(json.dumps({"header": header, "rows": rows}))
    for name in ("overview", "2x8", "backward-overview", "backward-2x4"):
        (folder / "h200" / f"{name}.png").write_bytes(b"\x89PNG")
    write_serving(folder, header)
    return folder


def write_serving(folder: Path, header: dict) -> None:
    """1.25 times as fast as the best recorded peer, and half as fast as a peer of the same run in one row. Packs, which
    have no recorded peers, are twice as fast."""
    from bench.lib import serving

    _, recorded = serving.load_recorded()
    rows = []
    for row in serving.decode_rows() + serving.verify_rows():
        times = recorded.get(serving.key(row), {"": 0.1})
        result = row | {"ms": min(times.values()) / 1.25, "err_o": 1.7e-3}
        if row["store"] != "none":
            result["err_state"] = 6e-8
        if row["kind"] == "decode" and row["batch"] == 1:
            result["hot_ms"] = result["ms"] * 0.9
        if serving.name_of(row) == "2/8 8 x 4 final float32 VK":
            result["peers"] = {"fla 0.6.0": result["ms"] / 2}
        rows.append(result)
    header = {name: header[name] for name in ("gpu", "date", "commit")}
    calls = {"gatedelta": 10.5, "fla 0.6.0": 110.0}
    more = {"copy_bytes_per_s": 4.25e12, "decode_call_us": calls, "verified_sequences": 4, "peers": {"fla": "0.6.0"}}
    (folder / "decode.json").write_text(json.dumps({"header": header | more, "rows": rows}))
    packs = [
        {name: x for name, x in row.items() if name != "lengths"}
        | {"ms": 0.1, "err_o": 3e-3, "err_state": 2e-3, "peers": {"flashinfer 0.7.2": 0.2}}
        for row in serving.pack_rows()
    ]
    (folder / "packs.json").write_text(json.dumps({"header": header, "rows": packs}))


def change(folder: Path, edit) -> None:
    path = folder / "h200.json"
    result = json.loads(path.read_text())
    edit(result)
    path.write_text(json.dumps(result))


def test_gpu_record(results, bench_folder):
    from bench.report import record, render
    from bench.report.tables import rows as csv
    from bench.report.tables import text

    names = ("headline", "summary", "h200-forward", "h200-profile")
    blocks = {name: render.TABLES[name] for name in names}
    assert {block() for block in blocks.values()} == {text.NOTHING}

    record.record_gpu(bench_folder)
    written = {path.name for path in results.iterdir()}
    pictures = {"overview.png", "2x8.png", "backward-overview.png", "backward-2x4.png"}
    assert written == {"record.json", "history.csv", *pictures}
    headline, summary, forward, profile = (block() for block in blocks.values())
    rows = csv.FILES["results/h200/rows/forward.csv"]()
    assert "| prefill kernels | fastest of FLA, FlashQLA, FlashInfer | **1.98×** | 0.50× | 171 |" in headline
    assert "- Longer prefill: 1 of 171 rows, down to 0.50× (2 key and 8 value heads, one sequence of" in headline
    assert "over the fastest of FLA, FlashQLA and FlashInfer | **1.98×** | 0.50× (2/8 1x2048) | 171 | 171 |" in summary
    assert "over the fastest of FLA and FlashQLA | **1.92×** | 0.50× (2/4 8k_2seq) | 32 | 32 |" in summary
    faster = render.TABLES["peers-faster"]()
    assert "| forward 2/8 1x2048 | 0.50× | flashinfer 0.7.2 |" in faster
    assert "| backward 2/4 8k_2seq | 0.50× | flash_qla 0.1.3 |" in faster
    assert "**NVIDIA H200**, driver 580.1, torch 2.11, 2026-01-02, 0123456789" in forward
    assert "| 16/64 8192x4 | 0.371 | 0.741 (flashinfer 0.7.2 use_cp=False) | 2.00× | 3.0e-03 |" in forward
    assert "The 89 rows" in forward and "GPU: geometric mean 2.00×, worst 2.00×" in forward
    assert "All 171 rows: geometric mean 1.98×, worst 0.50× (2/8 1x2048)." in forward
    assert "For 14 of the 171 rows FlashQLA published a shorter time" in forward
    assert "(../results/h200/overview.png)" in forward
    assert rows.count("\n") == 1 + 171 and "flash_qla published" in rows.splitlines()[0]
    assert "16,64,8192x4,0.3706,2," in rows
    assert "| 16/64 8192x4, forward | 0.51 ms | 66% |  |" in profile


def test_gpu_record_of_the_backward(results, bench_folder):
    from bench.report import record, render
    from bench.report.tables import chunked, text
    from bench.report.tables import rows as csv
    from bench.report.tables.headline import headline

    block, rows_file = render.TABLES["h200-backward"], csv.FILES["results/h200/rows/backward.csv"]
    assert block() == text.NO_BACKWARD and rows_file() == ""
    record.record_gpu(bench_folder)
    backward, rows = block(), rows_file()
    assert "| 16/32 32k_1seq | 1.18 | 2.35 (flash_qla 0.1.3) | 2.00× | 4.00 | 3.0e-03 | 1,500 |" in backward
    assert "published" not in backward  # no published time is below the measured ones
    assert backward.count("\n| ") == 2 + len(chunked.BACKWARD_LANDMARKS)
    assert "All 32 rows: geometric mean 1.92×, worst 0.50× (2/4 8k_2seq)." in backward
    assert "(../results/h200/backward-overview.png)" in backward
    assert rows.count("\n") == 1 + 4 * 8 and "flashinfer" not in rows
    times = "2,4,8k_2seq,0.5294,0.5,4,1572864000,524288,3,1073741824"
    assert f"{times},0.003,0.0029,0.0028,0.0027,0.0026,0.0025," in rows

    path = results / "record.json"  # a record from before there was a backward
    record = json.loads(path.read_text())
    record["rows"] = chunked.of_kind(record["rows"], "fwd")
    before = chunked.h200_forward(), csv.forward()
    path.write_text(json.dumps(record))
    assert block() == text.NO_BACKWARD and rows_file() == ""
    assert (chunked.h200_forward(), csv.forward()) == before
    assert "backward kernels" not in headline()


def test_gpu_record_is_a_line_per_row(results, bench_folder):
    from bench.report import record

    record.record_gpu(bench_folder)
    lines = (results / "record.json").read_text().splitlines()
    merged = json.loads("\n".join(lines))
    alone = json.loads((bench_folder / "h200.json").read_text())
    assert merged["header"] == alone["header"] | {"serving": merged["header"]["serving"]}
    assert merged["rows"][: 171 + 32] == alone["rows"] and merged["header"]["serving"]["peers"] == {"fla": "0.6.0"}
    rows = [json.loads(line.rstrip(",")) for line in lines if line.startswith('  {"kind": ')]
    assert len(rows) == 171 + 32 + 384 + 6 and not any("speedup" in row for row in rows)
    assert not any("peers" in row for row in rows[: 171 + 32])


def test_gpu_record_of_serving(results, bench_folder):
    from bench.report import record, render
    from bench.report.tables import rows as csv
    from bench.report.tables import text
    from bench.report.tables.headline import headline, summary

    names = ("h200-decode", "h200-verify", "h200-packs")
    blocks = [render.TABLES[name] for name in names]
    assert {block() for block in blocks} == {text.NO_SERVING}
    record.record_gpu(bench_folder)
    decode, verify, packs = (block() for block in blocks)
    rows = csv.FILES["results/h200/rows/serving.csv"]()
    assert "Decode, 210 rows with a peer: geometric mean 1.25×, worst 1.25×‡" in decode
    assert "| 1 | 2.70 | 1.25×‡ | 37% | 2.48 | 1.25×‡ | 20% | 3.24 | 1.25×‡ | 31% |" in decode
    assert "µs: fp32 2.43, bf16 2.23, fp32 [K, V] 2.91. Host time of an eager call, µs: 10.5 (fla 0.6.0 110)." in decode
    assert "Verify, one state or none, 100 rows with a peer: geometric mean 1.24×, worst 0.50× (2/8 8 x 4" in verify
    assert "| 2 drafts, accepted state, fp32 | 80.0 |  |" in verify
    assert "| 16/32 64 x 1 | 100 | 200 (flashinfer 0.7.2) | 2.00× | 3.0e-03 | 2.0e-03 |" in packs
    assert rows.count("\n") == 1 + 384 + 6 and "decode,16,32,1,1,float32,VK,final,,0.0027" in rows
    assert ",1.25,0.0017,6e-08," in rows
    assert "flashinfer 0.7.2 (recorded)" in rows.splitlines()[0]
    figures = summary()
    assert "| H200, packs, over FlashInfer | **2.00×** |" in figures and "‡" not in figures + headline()
    assert "H200, decode, over the fastest of FLA, FlashInfer, SGLang" in figures


def test_tables_of_runs_in_turns(results):
    from bench.lib.rows import BACKWARD_HEADS, BACKWARD_LENGTHS, forward_rows
    from bench.report import render
    from bench.report.tables import text
    from bench.report.tables.headline import over_fla
    from bench.report.tables.in_turns import headline_cells

    blocks = [render.TABLES[name] for name in ("flashinfer-same-run", "portable")]
    assert {block() for block in blocks} == {text.NOTHING} and headline_cells() == []
    results.mkdir()
    header = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "date": "2026-01-02", "base": "hopper",
              "commit": "0123456789abcdef", "modified": False}  # fmt: skip
    forward = [{key: row[key] for key in ("kind", "hk", "hv", "seq")} for row in forward_rows()]
    backward = [
        {"kind": "bwd", "hk": hk, "hv": hv, "seq": seq} for hk, hv in BACKWARD_HEADS for seq in BACKWARD_LENGTHS
    ]
    ragged = [{"kind": "ragged", "hk": 6, "hv": 18, "seq": "ragged0"}]

    def write(name: str, rows: list[dict], ms: dict, worst: dict) -> None:
        """The first row has other times."""
        timed = [row | {"ms": ms if i else ms | worst} for i, row in enumerate(rows)]
        (results / name).write_text(json.dumps({"header": header, "rows": timed}))

    write("in_turns.json", forward + ragged, {"hopper": 1.0, "flashinfer 1": 2.0, "flashinfer 1 use_cp=False": 3.0},
          {"flashinfer 1 use_cp=False": 0.5})  # fmt: skip
    write("portable.json", forward + backward, {"hopper": 1.0, "portable": 2.0, "fla 1": 5.0}, {"fla 1": 1.0})
    assert over_fla()[0].endswith("with FLA in the same run, we measure 5.0× and 5.0×.")
    flashinfer, portable = (block() for block in blocks)
    assert "| all rows | 1.98× | 0.50× (2/8 1x32768) | 171 | 1 | 1 |" in flashinfer
    assert "| 1024x8 | 2.00× | 2.00× (2/8 1024x8) | 9 | 0 | 0 |" in flashinfer
    assert "| 40 to 60 sequences of 1 to 1500 tokens | 2.00× | 2.00× (6/18 ragged0) | 1 | 0 | 0 |" in flashinfer
    assert "| forward 8/32 8192x4 | 1000 | 2000 | 2.00 | 5000 | 2.50 |" in portable
    assert "| forward 2/8 1x32768 | 1000 | 2000 | 2.00 | 1000 | 0.50 |" in portable
    assert "Forward: FLA takes 2.48× the time in the geometric mean of 171 rows, 0.50× (2/8 1x32768) in the" in portable
    assert "Backward: FLA takes 2.50× the time in the geometric mean of 32 rows" in portable
    labels = [f"H200, {name} in the same run" for name in (
        "forward, over FlashInfer", "ragged packs, over FlashInfer", "portable kernels, forward, over FLA",
        "portable kernels, backward, over FLA",
    )]  # fmt: skip
    assert [cells[0] for cells in headline_cells()] == labels and {cells[4] for cells in headline_cells()} == {"0"}


@pytest.mark.parametrize(
    "name, edit, reason",
    [
        ("decode", lambda result: result["rows"].pop(), "every row of bench"),
        ("packs", lambda result: result["rows"].pop(), "every row of bench"),
        ("decode", lambda result: result["header"].update(gpu="NVIDIA H100"), "every row of bench"),
        ("decode", lambda result: result["rows"][0].pop("err_state"), "without errors"),
    ],
)
def test_gpu_record_of_serving_is_refused(results, bench_folder, name, edit, reason):
    from bench.report import record

    path = bench_folder / f"{name}.json"
    result = json.loads(path.read_text())
    edit(result)
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match=reason):
        record.record_gpu(bench_folder)
    path.unlink()
    with pytest.raises(SystemExit, match="every row of bench"):
        record.record_gpu(bench_folder)
    assert not results.exists()


def test_gpu_records_are_appended_to_the_history(results, bench_folder):
    from bench.report import history, record

    def slow_down(result):
        result["header"]["commit"] = "f" * 40
        for row in result["rows"]:
            row["ms"] *= 2

    record.record_gpu(bench_folder)
    change(bench_folder, slow_down)
    record.record_gpu(bench_folder)
    change(bench_folder, lambda result: result.update(rows=[row for row in result["rows"] if row["kind"] == "fwd"]))
    before = history.line_of(json.loads((bench_folder / "h200.json").read_text()))
    assert "forward" in before and not {"backward", "backward_worst"} & before.keys()

    first, second = history.read(results / "history.csv")
    assert first == {
        "date": "2026-01-02", "commit": "0123456789", "modified": "False", "sm_clock_mhz": "1755",
        "sm_clock_max_mhz": "1980", "peers": history.peers_digest(), "forward": f"{2 * 0.25 ** (1 / 171):.4f}",
        "forward_full": "2.0000", "backward": f"{2 * 0.25 ** (1 / 32):.4f}", "forward_worst": "0.5000",
        "forward_worst_row": "2/8 1x2048", "backward_worst": "0.5000", "backward_worst_row": "2/4 8k_2seq",
        "decode": "1.2500", "verify_every": "1.2500", "verify": "1.2386", "packs": "2.0000", "serving_worst": "0.5000",
        "serving_worst_row": "2/8 8 x 4 final float32 VK",
    } | {name: first[name] for name in history.LANDMARKS}  # fmt: skip
    assert first["16/64 8192x4"] == "0.3706" and second["16/64 8192x4"] == "0.7412"
    assert second["commit"] == "f" * 10 and second["forward_full"] == "1.0000"


def test_history_ends_with_the_record():
    """The ratios of every line are to the present peers' table, and the last line is that of the record."""
    from bench.report import history, record

    lines = history.read(record.H200 / "history.csv")
    assert {line["peers"] for line in lines} == {history.peers_digest()}
    last = history.line_of(json.loads((record.H200 / "record.json").read_text()))
    assert lines[-1] == {name: str(last.get(name, "")) for name in history.COLUMNS}


def test_history_can_be_computed_again():
    from bench.report import history

    lines = history.read(history.HISTORY)
    try:
        again = history.computed_again(lines)
    except (LookupError, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git does not have the records here: {error}")
    assert [{name: str(line.get(name, "")) for name in history.COLUMNS} for line in again] == lines


@pytest.mark.parametrize(
    "edit, reason",
    [
        (lambda result: result["header"].update(gpu="NVIDIA H100"), "not from an H200"),
        (lambda result: result["rows"].pop(), "every row"),
        (lambda result: result["rows"].pop(0), "every row"),
        (lambda result: result["rows"][-1].pop("err_dh0"), "without errors"),
        (lambda result: result["rows"][5].pop("err_o"), "without errors"),
        (lambda result: result["header"].update(gpu="NVIDIA H200 NVL"), "without peers' times"),
        (lambda result: result["header"].pop("kernels"), "which kernels"),
    ],
)
def test_gpu_record_is_refused(results, bench_folder, edit, reason):
    from bench.report import record

    change(bench_folder, edit)
    with pytest.raises(SystemExit, match=reason):
        record.record_gpu(bench_folder)
    assert not results.exists()


def test_gpu_record_without_git_is_stamped(monkeypatch, results, bench_folder):
    from bench.report import record
    from bench.report.tables import chunked

    change(bench_folder, lambda result: result["header"].update(commit=None, modified=None))
    stamp = {"date": "2030-01-01", "commit": "f" * 40, "modified": True}
    monkeypatch.setattr(record, "stamp", lambda: stamp)
    record.record_gpu(bench_folder)
    assert (results / "history.csv").read_text().splitlines()[1].startswith("2026-01-02,ffffffffff,True,")
    assert "2026-01-02, ffffffffff with changes" in chunked.h200_forward()
    monkeypatch.setattr(record, "stamp", lambda: {**stamp, "commit": None})
    with pytest.raises(SystemExit, match="commit"):
        record.record_gpu(bench_folder)


def test_record_of_a_soak(monkeypatch, tmp_path):
    from bench.report import record

    for folder in ("CPU", "H200"):
        monkeypatch.setattr(record, folder, tmp_path / folder)
    machine = {"architecture": "x86_64", "cpu": "Some(R) CPU @ 2GHz", "cpus": 2, "best_isa": "avx2"}
    soak = {"machine": machine, "device": "cpu", "mismatches": 0, "failures": 0}
    path = tmp_path / "soak.json"
    path.write_text(json.dumps(soak))
    record.record_soak(path)
    assert (tmp_path / "CPU" / "x86-64-some-avx2-2cpu.soak.json").exists()
    on_gpu = soak | {"device": "cuda", "kernels": "portable", "machine": machine | {"gpu": "NVIDIA H200"}}
    path.write_text(json.dumps(on_gpu))
    record.record_soak(path)
    assert (tmp_path / "H200" / "soak_portable.json").exists()
    for bad, why in (
        (soak | {"mismatches": 1}, "something failed"),
        (on_gpu | {"machine": machine | {"gpu": "NVIDIA H100"}}, "not from an H200"),
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(SystemExit, match=why):
            record.record_soak(path)


def test_gpu_record_of_the_norm(results, run_python, tmp_path):
    from bench.report import record, render

    block = render.TABLES["h200-gated-norm"]
    assert block() == ""
    header = {
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "date": "2026-01-02",
        "commit": "0123456789abcdef",
        "modified": False,
    }
    times = {"forward": 2.0, "backward": 4.0, "copy, as forward": 1.8, "copy, as backward": 3.0, "FLA forward": 2.5}
    row = {"tokens": 4096, "heads": 64, "dim": 128, "dtype": "bfloat16", "us": times}
    path = tmp_path / "gated_norm.json"
    path.write_text(json.dumps({"header": header, "rows": [row]}))
    record.record_beside(path)
    assert "| 4096 × 64 | 2.00 | 0.90 | 2.50 | 4.00 | 0.75 |  |" in block()
    path.write_text(json.dumps({"header": header | {"gpu": "NVIDIA H100"}, "rows": [row]}))
    with pytest.raises(SystemExit, match="not from an H200"):
        record.record_beside(path)
    with pytest.raises(SystemExit, match="its name is none of"):
        record.record_beside(tmp_path / "norm.json")
    assert run_python("-m", "bench.report.record", check=False).returncode == 2
