"""The tests under each supported pair of Python and torch, each pair in an environment of its own.

    python -m benchmarks.matrix [--pythons 3.10 3.12] [--torch 2.11.0 2.15.0] [--tests tests/end_to_end] [--again]

The interpreters are those that PATH has as `python3.10` and so on, or pyenv. An environment is made in a temporary
folder, with the torch that the package index has for it (a CUDA build of several GB), and removed afterwards. Results
are written pair by pair; a pair that is there is not run again, but for `--again`. It ends with 1 where a pair that was
asked for has not passed. .github/workflows/tests.yml runs a pair in each job.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.stamp import stamp, write_result

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "matrix.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def interpreter(version: str) -> str | None:
    """The path of this Python (such as "3.12"), or None where the machine has none."""
    found = shutil.which(f"python{version}")
    # pyenv puts a command on PATH for each version that it has, which fails for those that are not chosen.
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else None


def environment(folder: Path, python: str, torch: str) -> Path:
    """Install memopt and this torch into a new environment in `folder`, and return its interpreter.

    Raises:
        subprocess.CalledProcessError: The index has no such torch for this Python, or the disk is full; the error's
            `stderr` has what pip said.
    """
    subprocess.run([python, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
    inside = folder / "bin" / "python"
    # The constraints pin the torch that this project is developed with.
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in pins if not line.startswith("torch==")]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
    install = [str(inside), "-m", "pip", "install", "--quiet", "-c", str(constraints), f"torch=={torch}"]
    subprocess.run([*install, "-e", f"{ROOT}[dev]"], check=True, capture_output=True, text=True)
    return inside


def run_tests(python: Path, tests: list[str]) -> dict[str, Any]:
    """Run the tests that are not slow on this machine's CPU, and return their counts and the names of the failed."""
    begin = time.perf_counter()
    command = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "-rfE", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {**counted(done.stdout), "minutes": round((time.perf_counter() - begin) / 60, 1)}


def counted(printed: str) -> dict[str, Any]:
    """The counts of a run of pytest, and the names of the tests that failed, from what it printed."""
    lines = printed.splitlines()
    counts = {what: int(n) for n, what in COUNTED.findall("\n".join(lines[-3:]))}
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {**counts, "not_passed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders of tests")
    parser.add_argument("--again", action="store_true", help="run the pairs that have a result, too")
    chosen = parser.parse_args()
    known: list[dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8"))["pairs"] if RESULT.exists() else []
    for torch in chosen.torch:
        for version in chosen.pythons:
            pair = {"python": version, "torch": torch, "tests": " ".join(chosen.tests)}
            same = [row for row in known if pair.items() <= row.items()]
            if same and not chosen.again:
                continue
            row = {**pair, **_outcome(version, torch, chosen.tests)}
            print(json.dumps(row), flush=True)
            known = [*(other for other in known if other not in same), row]
            write_result(RESULT, {**stamp(), "pairs": known})
    tests = " ".join(chosen.tests)
    asked = [
        row
        for row in known
        if row["python"] in chosen.pythons and row["torch"] in chosen.torch and row["tests"] == tests
    ]
    return int(not all(row.get("passed") and not row["not_passed"] for row in asked))


def _outcome(version: str, torch: str, tests: list[str]) -> dict[str, Any]:
    """The counts of one pair, or why it could not be run."""
    python = interpreter(version)
    if python is None:
        return {"not_run": f"this machine has no Python {version}"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            inside = environment(Path(folder), python, torch)
        except subprocess.CalledProcessError as failure:
            return {"not_run": str(failure.stderr).strip().splitlines()[-1]}
        return run_tests(inside, tests)


if __name__ == "__main__":
    sys.exit(main())
