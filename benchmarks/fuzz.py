"""Random models, budgets, optimizers and schedules, each trained plain and planned side by side.

    python -m benchmarks.fuzz --seeds 0 20000 [--minutes 60] [--workers 4] [--backend inductor] [--low] [--derivatives]
        [--cases 1] [--again]

A seed draws a model, a batch and an optimizer; its inputs may require gradients, be the results of other operators,
or be written to. Each of its cases draws a schedule for it: a budget for the solvers or a random schedule, planned
ahead or at the first call, there also only where the plain step does not fit. It trains two steps, then one that
accumulates, from the same state as the plain model, and compares all losses, gradients, buffers, parameters and
random numbers, of the first run of each emitted graph too, as nothing warms it up; within a budget, the memory of one
more step is measured. With `--low` the plan computes in bf16, with all levers that are on by default, and the first
step's gradients are to be near the plain ones; with `--derivatives` blocks are differentiated inside. One capture
serves the cases of a seed (`examples/models/random_trials.py`).

Results are written as they come, so that a run goes on where the last one stopped; `--again` repeats what was found.
The result file holds counts, every case that needs a look, and the seconds of all workers together. Fifty seeds run in
one process, on one thread of the CPU. Inductor's kernels are built without optimization (`quick_kernels`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Inductor compiles in this process: a pool of its own would load torch once more in each of its processes.
os.environ.update({"MEMOPT_PLAN": "always", "MEMOPT_CACHE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"})

import torch
import torch._inductor.config

from benchmarks.quick_kernels import quick_kernels
from benchmarks.stamp import stamp, write_result
from examples.models.random_trials import CASES, Trial, trials

RESULTS = Path(__file__).parent / "results"
AT_ONCE = 50
LIMIT_SECONDS = {"aten": 240, "inductor": 1200}
"""The time after which a seed that gives no result is taken for hanging, by backend: inductor calls a C++ compiler."""
EXPLAINED = ("refused", "rounding, named", "plain fails")
"""Verdicts that are counted by their reason; all others but "right" are listed."""


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        _run_here(arguments)
        return
    ways = [arguments.backend, "low" * arguments.low, "derivatives" * arguments.derivatives]
    ways = [way for way in ways if way not in ("aten", "")]
    record = _Record(RESULTS / ("_".join(["fuzz", *ways]) + ".json"))
    again = record.take_back() if arguments.again else {}
    wanted = sorted(again) if arguments.again else range(*arguments.seeds)
    end = time.time() + 60 * arguments.minutes
    left = deque(seed for seed in wanted if seed not in record.done)
    taking, adding = threading.Lock(), threading.Lock()

    def work() -> None:
        while time.time() < end:
            with taking:
                seeds = [left.popleft() for _ in range(min(AT_ONCE, len(left)))]
            if not seeds:
                return
            began = time.time()
            for results in _in_a_process(seeds, arguments):
                with adding:
                    record.add(results, again.get(results[0]["seed"]))
                    record.seconds, began = record.seconds + time.time() - began, time.time()
                    record.write()
                if time.time() > end:
                    return
            with taking:  # those behind one at which the process died
                left.extendleft(seed for seed in reversed(seeds) if seed not in record.done)

    with ThreadPoolExecutor(arguments.workers) as workers:
        for running in [workers.submit(work) for _ in range(arguments.workers)]:
            running.result()
    print(record)


AND = "; "
"""The separator of the commands whose cases a result file holds."""


class _Record:
    """The result file: counts of verdicts, the seeds that were tried, and the cases that need a look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.done = {seed for first, last in known.get("seeds", []) for seed in range(first, last + 1)}
        self.counts = Counter(known.get("counts", {}))
        self.reasons: dict[str, dict[str, int]] = known.get("reasons", {})
        self.found: list[dict[str, Any]] = known.get("found", [])
        self.seconds = known.get("seconds", 0.0)
        self.commands: list[str] = known["command"].split(AND) if known else []

    def __str__(self) -> str:
        return f"{self.counts.total()} cases in {self.seconds:.0f} s: {dict(+self.counts)}"

    def take_back(self) -> dict[int, set[int]]:
        """The listed cases by seed, which then count as not tried."""
        taken: dict[int, set[int]] = {}
        for result in self.found:
            taken.setdefault(result["seed"], set()).add(result["case"])
            self.counts[result["verdict"]] -= 1
        self.done -= taken.keys()
        self.found = []
        return taken

    def add(self, results: list[dict[str, Any]], cases: set[int] | None = None) -> None:
        """Add the results of a seed: those of all its cases, or of these."""
        self.done.add(results[0]["seed"])
        for result in results:
            if cases is not None and result["case"] not in cases:
                continue
            self.counts[result["verdict"]] += 1
            if result["verdict"] in EXPLAINED:
                reason = self.reasons.setdefault(_reason(result), {"cases": 0, "first_seed": result["seed"]})
                reason["cases"] += 1
            elif result["verdict"] != "right":
                self.found.append(result)
                print(json.dumps(result), flush=True)

    def write(self) -> None:
        """Write the file."""
        ranges: list[list[int]] = []
        for seed in sorted(self.done):
            if ranges and ranges[-1][1] == seed - 1:
                ranges[-1][1] = seed
            else:
                ranges.append([seed, seed])
        made = stamp()
        document = {
            **made,
            "command": AND.join(dict.fromkeys([*self.commands, made["command"]])),
            "cases": self.counts.total(),
            "counts": dict(+self.counts),
            "seconds": round(self.seconds),
            "seeds": ranges,
            "reasons": dict(sorted(self.reasons.items(), key=lambda item: -item[1]["cases"])),
            "found": sorted(self.found, key=lambda result: (result["seed"], result["case"])),
        }
        write_result(self.path, document)


def _reason(result: dict[str, Any]) -> str:
    """The verdict with the cause, without figures and lines of code, so that equal causes have equal texts."""
    if result["verdict"] == "rounding, named":
        return "rounding, named"
    text = result["message"].replace("the forward of RandomModel cannot be captured as a graph: ", "")
    cause = re.split(r" \(|; |: the smallest that works| of [0-9]", text)[0][:120]
    return f"{result['verdict']}: {cause}"


def _in_a_process(seeds: list[int], arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The results of these seeds, those of all its cases for each; where the process dies or hangs, the seed at which
    it did is the last one."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--backend", arguments.backend, "--cases", str(arguments.cases)]
    command += [*["--low"] * arguments.low, *["--derivatives"] * arguments.derivatives, "--child", *map(str, seeds)]
    limit = LIMIT_SECONDS[arguments.backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        output = process.stdout
        threading.Thread(target=_pass_on, args=(output, lines), daemon=True).start()
        try:
            for seed in seeds:
                reason = "its process died"
                try:
                    line = lines.get(timeout=limit)
                except queue.Empty:
                    line, reason = "", f"no result after {limit} s"
                if not line:
                    yield [Trial(seed, 0, "error not ours", "", reason).record()]
                    return
                yield json.loads(line)
        finally:
            process.kill()


def _pass_on(output: Iterable[str], lines: queue.Queue[str]) -> None:
    """Put all lines into the queue as they come, and an empty one after the last."""
    for line in output:
        lines.put(line)
    lines.put("")


def _run_here(arguments: argparse.Namespace) -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models or compilers print
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.fallback_random = True  # dropout draws as in eager mode
    torch._inductor.config.emulate_precision_casts = True  # a model's own casts to 16 bits round as in eager mode
    for number, seed in enumerate(arguments.child):
        found = trials(seed, arguments.backend, arguments.cases, low=arguments.low, derivatives=arguments.derivatives)
        with quick_kernels():
            print(json.dumps([one.record() for one in found]), file=results, flush=True)
        if number == 0:
            gc.freeze()  # what all seeds share need not be looked through for garbage at each


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 1000], metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--backend", choices=("aten", "inductor"), default="aten")
    parser.add_argument("--low", action="store_true", help="plans that compute in bf16")
    parser.add_argument("--derivatives", action="store_true", help="blocks that are differentiated inside")
    parser.add_argument("--cases", type=int, default=CASES, help="cases of each seed")
    parser.add_argument("--again", action="store_true", help="repeat the seeds that were not right")
    parser.add_argument("--child", nargs="*", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
