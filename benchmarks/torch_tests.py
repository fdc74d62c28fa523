"""torch's own tests of AOTAutograd and activation checkpointing, once with torch's partitioner and once with memopt's.

    python -m benchmarks.torch_tests ~/pytorch/test/functorch/test_aotdispatch.py [...]

The test files do not come with torch's packages: take those of a checkout of PyTorch at the version that is installed.
In the second run each joint graph that torch would partition is priced by memopt, scheduled so that everything is
recomputed that may be, and partitioned by that schedule. Results are written after each file; a file that is named
again is run again. docs/torch_tests.md is made from the result file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from benchmarks.stamp import stamp, write_result
from memopt.capture.joint import JointGraph
from memopt.emit.emit import partition
from memopt.planning.schedule_parts import RegionSchedule
from memopt.price.price import price
from memopt.price.priced_graph import GraphUse, NodePrice
from memopt.solver.min_cut import just_in_time

RESULT = Path(__file__).parent / "results" / "torch_tests.json"
PAGE = Path(__file__).parent.parent / "docs" / "torch_tests.md"
BOTH = "fails with torch's partition too"
LIMIT_SECONDS = 1800
"""The time limit for one file in one of the two ways."""

INTRODUCTION = """# torch's own tests

PyTorch's tests of AOTAutograd and of activation checkpointing, run twice: as they are, and with memopt's partitioner
wherever AOTAutograd would use one of torch's own. memopt prices each joint graph, schedules everything that may be
recomputed right before the backward reads it, and partitions by that schedule. The files do not come with torch's
packages; these are copies of PyTorch's that were changed for other devices: test_aotdispatch.py from
intel/torch-xpu-ops at a3ac8ad4b, of torch 2.13, with a `common_utils.py` cut down to what it reads, and
test_activation_checkpointing.py from Ascend/pytorch at v7.3.1, of torch 2.2, with its device put back to the CPU.
Figures in `benchmarks/results/torch_tests.json`, by `python -m benchmarks.torch_tests FILE ...`."""


def everything_recomputed(
    joint: torch.fx.GraphModule, _: Any, *, num_fwd_outputs: int, overwritten: Collection[int], **__: Any
) -> Any:
    """A partitioner for AOTAutograd: memopt's, with a schedule that recomputes all that may be recomputed, each value
    right before the backward reads it. `overwritten` numbers the inputs that are written over once the forward is
    over."""
    graph = JointGraph.of(joint, num_fwd_outputs, frozenset())
    # No receivers of gradients: their strides serve to price autograd's copies, which a schedule without a budget does
    # not need, and with tensor subclasses the gradients are not numbered as the inputs are.
    use = GraphUse(overwritten=overwritten, receivers={})
    priced = price(graph.module, num_fwd_outputs, lambda _: NodePrice(1.0, 0), use)
    evaluations = just_in_time(priced.problem, ()).evaluations
    names = [priced.nodes[op] for op in evaluations]
    forward = list(filter(None, names[: evaluations.index(priced.problem.forward_ops)]))
    return partition(graph, RegionSchedule("", tuple(filter(None, names)), len(forward)))


def pytest_configure() -> None:
    """As a plugin of pytest: have AOTAutograd use this partitioner wherever it would use one of torch's own."""
    partitioned = graph_compile._partition_joint_graph_into_fw_bw
    torchs_own = (default_partition, min_cut_rematerialization_partition)

    def by_ours(*args: Any) -> Any:
        *given, facts, config, partitioner = args
        if partitioner in torchs_own:
            partitioner = partial(everything_recomputed, overwritten=facts.mutated_inp_runtime_indices)
        return partitioned(*given, facts, config, partitioner)

    graph_compile._partition_joint_graph_into_fw_bw = by_ours


def outcomes(file: Path, options: Sequence[str] = ()) -> dict[str, str]:
    """The outcome of each test of a file: "passed", "skipped", or the message of its failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Without the cache and the settings of the project that the file lies in.
        settings = ["-p", "no:cacheprovider", "-c", "/dev/null", f"--junitxml={report}", *options]
        command = [sys.executable, "-m", "pytest", str(file), *settings]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report for {file}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return " ".join(f"{found.get('message')}".split())[:3000]
    return "skipped" if case.find("skipped") is not None else "passed"


REASONS = (
    (r"^AssertionError: ['\"]def ", "compares the text of the forward's graph with that of torch's partition"),
    (r"^AssertionError: (Scalars are not equal|Booleans mismatch)", "counts the values that torch's partition saves"),
    (
        r"^AssertionError: In graph GraphModule",
        "counts recomputed operators, of which memopt leaves out those of saved outputs",
    ),
    (
        r"modified by an inplace operation",
        "saves an input that AOTAutograd writes over after the forward; memopt captures such writes in the graph",
    ),
    (r"Cannot access storage of SparseTensorImpl", "sparse gradients, which memopt refuses"),
    (r"Tensor-likes are not close", "a joint graph that writes (`disable_functionalization`): memopt never traces one"),
)
"""Patterns of failures' messages, each with its reason, for tests that only memopt's partition fails."""


def record(file: Path) -> dict[str, Any]:
    """Run the tests of a file in both ways: how many passed, and each failure with its reason."""
    stock, ours = outcomes(file), outcomes(file, ["-p", "benchmarks.torch_tests"])
    failures = []
    for test, message in ours.items():
        if message in ("passed", "skipped"):
            continue
        reason = next((why for pattern, why in REASONS if re.search(pattern, message)), "not known")
        if stock.get(test) not in ("passed", "skipped"):
            reason = f"{BOTH}: {stock[test].removeprefix('AssertionError: ')[:60]}"
        failures.append({"test": test, "reason": reason, "message": message[:300]})
    return {"stock": _counted(stock), "memopt": _counted(ours), "failures": failures}


def _counted(outcomes: dict[str, str]) -> dict[str, int]:
    return dict(Counter(found if found in ("passed", "skipped") else "failed" for found in outcomes.values()))


def page(records: dict[str, dict[str, Any]]) -> str:
    """Return docs/torch_tests.md: how many tests of each file passed, and each failure with its reason."""
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        "| file | partition | passed | failed | skipped |",
        "|---|---|---|---|---|",
    ]
    for file, found in records.items():
        for way, name in (("stock", "torch"), ("memopt", "memopt")):
            counts = found[way]
            cells = (file, name, *(counts.get(outcome, 0) for outcome in ("passed", "failed", "skipped")))
            lines.append(f"| {' | '.join(map(str, cells))} |")
    failures = [(file, failure) for file, found in records.items() for failure in found["failures"]]
    reasons = Counter(BOTH if failure["reason"].startswith(BOTH) else failure["reason"] for _, failure in failures)
    lines += ["", "## Failures with memopt's partition", "", "| reason | tests |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    lines += ["", "| file | test | reason |", "|---|---|---|"]
    lines += [f"| {file} | {failure['test']} | {failure['reason']} |" for file, failure in failures]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="test files of PyTorch's repository")
    known: dict[str, dict[str, Any]] = json.loads(RESULT.read_text())["files"] if RESULT.exists() else {}
    for file in parser.parse_args().files:
        if not file.exists():
            parser.error(f"{file} does not exist")
        known[file.name] = found = record(file.resolve())
        write_result(RESULT, {**stamp(), "files": known})
        PAGE.write_text(page(known), encoding="utf-8")
        print(f"{file.name}: torch {found['stock']}, memopt {found['memopt']}", flush=True)


if __name__ == "__main__":
    main()
