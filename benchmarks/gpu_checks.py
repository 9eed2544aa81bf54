"""Runs the tests that need a GPU, many processes at once on one device, and writes down what came out.

    python benchmarks/gpu_checks.py [--jobs 14] [--minutes 8] [--only TEXT] [--out results/parity]

The tests of all kernels (tests/ops/test_triton_*, which run on the GPU where there is one) and what is marked `gpu`
elsewhere. Tests over the same kernels go to one process, since compiling is most of the time. The record is written
after each process: every test with its outcome and seconds, and the largest errors against float64 by dtype and tensor.
A run that is cut short says which tests were not run; the same command at the same commit goes on with those that have
not passed. Writes <out>/<gpu>.json; exit code 1 unless everything passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from oqc.files import write_whole
from oqc.train import find_device
from oqc.train.environment import environment

ROOT = Path(__file__).resolve().parents[1]
FAMILY = re.compile(r"\[(D\d+-H\d+-.*?)(-torch\.\w+)?\]$")  # an id ends with the kernels that its test needs
FIRST = (
    "tests/train",
    "test_triton_compiles",
    "test_triton_spatial.py",
    "three_hundred_shapes",
    "awkward_shapes",
    "test_triton_fused.py",
)
CHUNK = 3  # tests of one file for a process, where they share no kernels


def pytest(*options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *options]


def collect(only: str) -> list[str]:
    """Ids of the tests to run. Files without such tests are not even imported: they may need packages not at hand."""
    found: list[str] = []
    kernels = sorted(ROOT.glob("tests/ops/test_triton_*.py"))
    marked = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text()]
    for paths, choice in ((kernels, []), (marked, ["-m", "gpu"])):
        command = pytest("--collect-only", "-q", "-o", "addopts=", *choice, *map(str, paths))
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(result.stdout + result.stderr)
        found += [line for line in result.stdout.splitlines() if "::" in line]
    return [name for name in dict.fromkeys(found) if only in name]


def units(names: list[str]) -> list[list[str]]:
    """The tests of each process: of one family of kernels, of one function that trains, or a few of one file."""
    groups: dict[str, list[str]] = defaultdict(list)
    files: Counter[str] = Counter()
    for name in names:
        path, _, function = name.partition("::")
        family = FAMILY.search(name)
        if family:
            own = family.group(1) + (family.group(2) or "-torch.float32")
        elif path.startswith("tests/train"):
            own = function.partition("[")[0]
        else:
            own = f"{path} {files[path] // CHUNK}"
            files[path] += 1
        groups[own].append(name)

    def place(group: list[str]) -> int:
        return min((i for i, text in enumerate(FIRST) for name in group if text in name), default=len(FIRST))

    return sorted(groups.values(), key=place)


def run(names: list[str], until: float) -> list[dict[str, Any]]:
    """One process; every test with its outcome, seconds and what it put on record."""
    left = until - time.monotonic()
    if left < 10:
        return [{"test": name, "outcome": "not run"} for name in names]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = pytest("-q", f"--junit-xml={report}", "--tb=short", *names)
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return [{"test": name, "outcome": "cut short"} for name in names]
        if not report.exists():
            return [
                {"test": name, "outcome": "crashed", "message": (result.stdout + result.stderr)[-2000:]}
                for name in names
            ]
        cases = ElementTree.parse(report).getroot().iter("testcase")
        rows = {_name(case): _row(case) for case in cases}
    return [{"test": name, **rows.get(name, {"outcome": "not run"})} for name in names]


def _name(case: ElementTree.Element) -> str:
    return f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def _row(case: ElementTree.Element) -> dict[str, Any]:
    row: dict[str, Any] = {"outcome": "passed", "seconds": round(float(case.attrib["time"]), 2)}
    for kind in ("failure", "error", "skipped"):
        problem = case.find(kind)
        if problem is not None:
            row |= {"outcome": kind, "message": (problem.attrib.get("message") or problem.text or "")[:2000]}
    recorded = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
    if "errors" in recorded:
        row |= {"dtype": recorded["dtype"], "shapes": int(recorded["shapes"]), "errors": json.loads(recorded["errors"])}
    return row


def largest(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By dtype and tensor: the largest error of one shape, of a family, and of a family over the literal equations'."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for row in rows:
        for name, error in row.get("errors", {}).items():
            over = error["pooled"] / error["literal"] if error["literal"] else 0.0
            now = {"one_shape": error["worst"], "family": error["pooled"], "family_over_literal": over}
            before = found[row["dtype"]].get(name, now)
            found[row["dtype"]][name] = {key: max(now[key], before[key]) for key in now}
    return found


def passed_before(path: Path, place: dict[str, Any]) -> dict[str, Any]:
    """The record's tests that passed, if it is of this commit on such a machine; it is not of a commit with changes."""
    if not path.exists() or "+" in (place["commit"] or "+"):
        return {}
    record = json.loads(path.read_text())
    if any(record["environment"].get(name) != place.get(name) for name in ("commit", "gpu", "versions")):
        return {}
    return {row["test"]: row for row in record["tests"] if row["outcome"] == "passed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--minutes", type=float, default=8.0, help="what is not done by then is not run")
    parser.add_argument("--only", default="", help="only tests with this text in their id")
    parser.add_argument("--out", type=Path, default=Path("results/parity"))
    args = parser.parse_args()

    began = time.monotonic()
    device = find_device(None)
    place = environment(device)
    path = args.out / f"{place.get('gpu', 'cpu').lower().replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = collect(args.only)
    if not names:
        raise SystemExit(f"no test has {args.only!r} in its id")
    before = passed_before(path, place)
    rows = {name: {"test": name, "outcome": "not run"} for name in names} | before
    left = [name for name in names if name not in before]
    print(f"{len(left)} of {len(names)} tests, {len(names) - len(left)} passed before at this commit", flush=True)
    lock = threading.Lock()

    def work(group: list[str]) -> None:
        result = run(group, began + 60 * args.minutes)
        with lock:
            rows.update({row["test"]: row for row in result})
            every = list(rows.values())
            outcomes = Counter(row["outcome"] for row in every)
            seconds = round(time.monotonic() - began, 1)
            record = {"environment": place, "seconds": seconds, "outcomes": outcomes, "largest_errors": largest(every)}
            write_whole(path, json.dumps(record | {"tests": every}, indent=1) + "\n")
            bad = [row for row in result if row["outcome"] != "passed"]
            print(f"{seconds:6.1f} s  {len(result) - len(bad)} of {len(result)} passed: {group[0]}", flush=True)
            for row in bad:
                print(f"          {row['outcome']}: {row['test']} {row.get('message', '')[:300]}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, units(left)))
    outcomes = Counter(row["outcome"] for row in rows.values())
    print(json.dumps({"outcomes": outcomes, "seconds": round(time.monotonic() - began, 1), "file": str(path)}))
    return int(set(outcomes) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
