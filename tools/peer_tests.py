#!/usr/bin/env python3
"""Runs the test suites of other libraries on this one, unmodified, and records what passes (see results/SCHEMA.md).

usage: peer_tests.py [--device cpu|cuda] [--peers FOLDER] [--suites NAMES] [--jobs N] [--every N] [--seconds S]
                     [--output FILE] [--append]

FOLDER holds checkouts of the libraries' repositories. A suite that is not there is looked for in a source distribution,
if there is one with tests. The libraries' packages must be installed in this Python. A suite that cannot be run counts
as not run. The status is 1 if a test fails that no documented difference explains, or if no test was run at all.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import dev_paths  # noqa: F401  (the package under test)
import peer_suites
import records
from peer_suites import Suite
from repo_files import ROOT, stamp

DOWNLOADS = ROOT / "build" / "peers"
SHOWN = 20  # failures of a suite; the record has all
VERSIONS = ("torch", "triton", "fla-core", "flash-qla", "flashinfer-python", "pytest")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers", help="folder of checkouts")
    parser.add_argument("--suites", default=",".join(peer_suites.suites()), help="names, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, which share a suite's tests")
    parser.add_argument("--every", type=int, default=1, help="run one test in so many")
    parser.add_argument("--seconds", type=float, default=3600, help="limit for each suite")
    parser.add_argument("--output", type=Path, help="default: results/<device>/peer_tests.json")
    parser.add_argument("--append", action="store_true", help="keep the other suites of the file")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers.resolve()  # the tests run elsewhere
    arguments.suites = [name for name in arguments.suites.split(",") if name]
    unknown = set(arguments.suites) - set(peer_suites.suites())
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(peer_suites.suites())}")
    if min(arguments.jobs, arguments.every) < 1:
        parser.error("--jobs and --every are at least 1")
    return arguments


def environment(device: str) -> dict[str, str]:
    """For the Pythons started from here: the package under test, which dev_paths has put there, and this folder."""
    result = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), os.environ["PYTHONPATH"]])}
    return result | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def find(suite: Suite, peers: Path) -> tuple[Path | None, str]:
    """The folder with its tests and what that is, or None and what is missing."""
    for package in suite.packages:
        if importlib.util.find_spec(package) is None:
            return None, f"the package {package} is not installed"
    checkout = peers / suite.repository
    missing = [file for file in suite.files if not (checkout / file).exists()]
    if not missing:
        command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True)
        top, commit = (result.stdout.split("\n") + ["", ""])[:2]
        return checkout, f"checkout {commit}" if top and Path(top) == checkout.resolve() else "checkout"
    here = f"no {missing[0]} in {checkout}"
    if suite.source is None:
        return None, f"{here}, and no source distribution has it"
    folder = DOWNLOADS / suite.name
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary",
               ":all:", "--dest", str(folder), suite.source]  # fmt: skip
    subprocess.run(command, capture_output=True)  # what counts is whether the files are there
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        unpacked = folder / archive.name.removesuffix(".tar.gz")
        if all((unpacked / file).exists() for file in suite.files):
            return unpacked, archive.name
    return None, f"{here}, and {suite.source} cannot be downloaded or lacks it"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def start(suite: Suite, folder: Path, scratch: Path, shard: int, arguments: argparse.Namespace) -> subprocess.Popen:
    lines = scratch / f"{shard}.jsonl"
    configuration = scratch / "pytest.ini"  # instead of the repository's, which may ask for plugins
    configuration.write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "peer_suites.plugin",
        "-p", "no:cacheprovider", "--import-mode=importlib", "--continue-on-collection-errors",
        "-c", str(configuration), "--rootdir", str(folder),
        *suite.options, *(str(folder / file) for file in suite.files),
    ]  # fmt: skip
    variables = {
        **environment(arguments.device), **suite.environment, "PEER_SUITE": suite.name,
        "PEER_DEVICE": arguments.device, "PEER_SHARD": f"{shard}/{arguments.jobs}", "PEER_LINES": str(lines),
        "PEER_EVERY": str(arguments.every),
    }  # fmt: skip
    # Not in the checkout: Python would import the library from there.
    with open(scratch / f"{shard}.log", "w") as log:
        return subprocess.Popen(command, cwd=scratch, env=variables, stdout=log, stderr=subprocess.STDOUT)


def run(suite: Suite, folder: Path, arguments: argparse.Namespace) -> dict:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        processes = [start(suite, folder, scratch, shard, arguments) for shard in range(arguments.jobs)]
        ends = []
        for process in processes:
            try:
                process.wait(max(0.1, begin + arguments.seconds - time.monotonic()))
                ends.append("")
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ends.append(f"stopped after {arguments.seconds:.0f} s")
        shards = [lines_of(scratch / f"{shard}.jsonl") for shard in range(arguments.jobs)]
        logs = [(scratch / f"{shard}.log").read_text() for shard in range(arguments.jobs)]
    result = summary(suite, shards, arguments.device)
    for process, end, lines, log in zip(processes, ends, shards, logs):
        stopped = next((line["stopped"] for line in lines if "stopped" in line), None)
        if stopped or (not any("collected" in line for line in lines)):
            result["why_not_run"] = stopped or end or (log.strip().splitlines() or ["no output"])[-1][:300]
        elif result["not_run"] and "why_not_run" not in result:
            result["why_not_run"] = end or f"pytest ended with status {process.returncode}"
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def summary(suite: Suite, shards: list[list[dict]], device: str) -> dict:
    """Counts of what the processes wrote. A test that has no line of its own was not run."""
    tests: dict[str, dict] = {}
    for line in (line for lines in shards for line in lines if "test" in line):
        if tests.get(line["test"], {}).get("outcome") != "failed":  # of call and teardown the failure counts
            tests[line["test"]] = line
    collected = [test for lines in shards for line in lines for test in line.get("collected", ())]
    failed, differences = [], collections.Counter()
    for test, line in tests.items():
        if line["outcome"] != "failed":
            continue
        rule = peer_suites.rule_of(suite.differences, test, device)
        if rule:
            differences[rule.reason] += 1
        else:
            failed.append({"test": test, "reason": line["reason"]})

    def counted(outcome: str) -> list[dict]:
        found = collections.Counter(line["reason"] for line in tests.values() if line["outcome"] == outcome)
        return [{"reason": reason, "tests": count} for reason, count in found.most_common()]

    return {
        "passed": sum(line["outcome"] == "passed" for line in tests.values()),
        "failed": failed,
        "differences": [{"reason": reason, "tests": count} for reason, count in differences.most_common()],
        "skipped": counted("skipped"),
        "foreign": counted("foreign"),
        "heavy": counted("heavy"),
        "not_run": sum(test not in tests for test in collected),
    }


def describe(name: str, result: dict) -> str:
    if "passed" not in result:
        return f"{name}: NOT RUN: {result['why_not_run']}"
    parts = [f"{result['passed']} passed", f"{len(result['failed'])} failed"]
    for key, text in (("differences", "differ as documented"), ("skipped", "skipped by the suite"),
                      ("foreign", "not ours"), ("heavy", "too large to be run here")):  # fmt: skip
        count = sum(entry["tests"] for entry in result[key])
        if count:
            parts.append(f"{count} {text}")
    if result["not_run"] or "why_not_run" in result:
        parts.append(f"{result['not_run']} NOT RUN: {result.get('why_not_run')}")
    return f"{name}: {', '.join(parts)}; {result['seconds']} s"


def header(arguments: argparse.Namespace) -> dict:
    versions = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    name = "torch.cuda.get_device_name()" if arguments.device == "cuda" else "gatedelta.info()['cpu_isa_best']"
    code = f"import gatedelta, json, torch; print(json.dumps([gatedelta.info()['version'], {name}]))"
    result = subprocess.run([sys.executable, "-c", code], env=environment(arguments.device), capture_output=True,
                            text=True)  # fmt: skip
    if result.returncode:
        sys.exit(f"peer_tests: gatedelta does not run on {arguments.device}:\n{result.stderr.strip()}")
    versions["gatedelta"], machine = json.loads(result.stdout.splitlines()[-1])
    return {**stamp(), "device": arguments.device, "machine": machine, "every": arguments.every, "versions": versions}


def default_output(header: dict) -> Path:
    if header["device"] == "cpu":
        return ROOT / "results" / "cpu" / "peer_tests.json"
    # Of GPUs, results/ has the H200's alone.
    return ROOT / ("results/h200" if "H200" in header["machine"] else "build") / "peer_tests.json"


def main() -> int:
    arguments = parse()
    record = {"header": header(arguments), "suites": []}
    output = arguments.output or default_output(record["header"])
    for name in arguments.suites:
        suite = peer_suites.suites()[name]
        folder, what = find(suite, arguments.peers)
        result = {"source": what, **run(suite, folder, arguments)} if folder else {"why_not_run": what}
        print(describe(name, result), flush=True)
        for failure in result.get("failed", ())[:SHOWN]:
            print(f"  {failure['test']}: {failure['reason'][:160]}")
        record["suites"].append({"name": name, **result})
    kept = json.loads(output.read_text()) if arguments.append and output.exists() else {"header": {}, "suites": []}
    of = {key: kept["header"].get(key) for key in ("date", "commit")}
    others = [of | suite for suite in kept["suites"] if suite["name"] not in arguments.suites]
    records.write(output, record | {"suites": others + record["suites"]})
    print(f"recorded in {output}")
    ran = sum(suite.get("passed", 0) for suite in record["suites"])
    return 1 if not ran or any(suite.get("failed") for suite in record["suites"]) else 0


if __name__ == "__main__":
    sys.exit(main())
