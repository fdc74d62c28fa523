"""Random models, budgets, optimisers and schedules, each trained plain and planned side by side.

    python -m benchmarks.fuzz --seeds 0 20000 [--minutes 60] [--backend inductor] [--again]

Each case is a seed. Results are written as they come, so that a run goes on where the last one stopped; `--again`
repeats what was found. The result file holds counts and every seed that is not right. Cases run in a process of their
own, fifty at a time, on one thread of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.update({"MEMOPT_PLAN": "always", "MEMOPT_CACHE": "0"})

import torch

from benchmarks.stamp import stamp, write_result
from examples.models.random_trials import Trial, trial

RESULTS = Path(__file__).parent / "results"
AT_ONCE = 50
LIMIT_SECONDS = 120
"""The time after which a case that gives no result is taken for hanging."""


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        _run_here(arguments.child, arguments.backend)
        return
    record = _Record(RESULTS / ("fuzz.json" if arguments.backend == "aten" else f"fuzz_{arguments.backend}.json"))
    wanted = record.taken_back() if arguments.again else range(*arguments.seeds)
    end = time.time() + 60 * arguments.minutes
    while (left := [seed for seed in wanted if seed not in record.done][:AT_ONCE]) and time.time() < end:
        began = time.time()
        for result in _in_a_process(left, arguments.backend):
            record.add(result)
            record.seconds, began = record.seconds + time.time() - began, time.time()
            record.write()
            if time.time() > end:
                break
    print(record)


class _Record:
    """The result file: counts of verdicts, the seeds that were tried, and all results that are not right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.done = {seed for first, last in known.get("seeds", []) for seed in range(first, last + 1)}
        self.found: dict[int, dict[str, Any]] = {result["seed"]: result for result in known.get("found", [])}
        self.seconds = known.get("seconds", 0.0)

    def __str__(self) -> str:
        return f"{len(self.done)} cases in {self.seconds:.0f} s: {self.counts}"

    @property
    def counts(self) -> dict[str, int]:
        """Verdict → number of cases."""
        others = Counter(result["verdict"] for result in self.found.values())
        return {"right": len(self.done) - len(self.found), **others}

    def taken_back(self) -> list[int]:
        """The seeds that were not right, which then count as not tried."""
        seeds = sorted(self.found)
        self.done -= set(seeds)
        self.found = {}
        return seeds

    def add(self, result: dict[str, Any]) -> None:
        """Add the result of a seed."""
        self.done.add(result["seed"])
        if result["verdict"] != "right":
            self.found[result["seed"]] = result
            print(json.dumps(result), flush=True)

    def write(self) -> None:
        """Write the file."""
        ranges: list[list[int]] = []
        for seed in sorted(self.done):
            if ranges and ranges[-1][1] == seed - 1:
                ranges[-1][1] = seed
            else:
                ranges.append([seed, seed])
        found = [self.found[seed] for seed in sorted(self.found)]
        write_result(
            self.path,
            {**stamp(), "counts": self.counts, "seconds": round(self.seconds), "seeds": ranges, "found": found},
        )


def _in_a_process(seeds: list[int], backend: str) -> Iterator[dict[str, Any]]:
    """The results of these seeds; where the process dies or hangs, the seed at which it did is the last one."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--backend", backend, "--child", *map(str, seeds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        output = process.stdout
        threading.Thread(target=_pass_on, args=(output, lines), daemon=True).start()
        try:
            for seed in seeds:
                reason = "its process died"
                try:
                    line = lines.get(timeout=LIMIT_SECONDS)
                except queue.Empty:
                    line, reason = "", f"no result after {LIMIT_SECONDS} s"
                if not line:
                    yield Trial(seed, "error not ours", "", reason).record()
                    return
                yield json.loads(line)
        finally:
            process.kill()


def _pass_on(output: Iterable[str], lines: queue.Queue[str]) -> None:
    """Put all lines into the queue as they come, and an empty one after the last."""
    for line in output:
        lines.put(line)
    lines.put("")


def _run_here(seeds: list[int], backend: str) -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models or compilers print
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in seeds:
        print(json.dumps(trial(seed, backend).record()), file=results, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 1000], metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--backend", choices=("aten", "inductor"), default="aten")
    parser.add_argument("--again", action="store_true", help="repeat the seeds that were not right")
    parser.add_argument("--child", nargs="*", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
