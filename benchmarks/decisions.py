"""What it costs that operators which decide (topk, comparisons; docs/backends.md) are never recomputed: steps of the
sweep's mixtures of experts, priced with these operators marked, and with none marked.

    python -m benchmarks.decisions [--only mixtral olmoe] [--backend aten] [--device h100]

Nothing runs: steps are planned for a card, by plain operators or through inductor, in bf16 where the card has it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ.update({"MEMOPT_PLAN": "always", "MEMOPT_CACHE": "0"})

import memopt
from benchmarks.small_architectures import build
from benchmarks.stamp import stamp, write_result
from memopt.capture.joint import JointGraph
from memopt.planning.priced_step import PricedStep
from memopt.planning.schedule_parts import decision_rows
from memopt.solver import Schedule, simulate

RESULT = Path(__file__).parent / "results" / "decisions.json"
MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "granitemoe", "phimoe", "gpt_oss",
    "ernie4_5_moe", "glm4_moe", "dots1", "hunyuan_v1_moe", "flex_olmo", "jetmoe", "minimax",
)  # fmt: skip
HALF = 0.5
"""Where the budget lies between the least that works and the peak with nothing recomputed."""


def without_marks(step: PricedStep) -> PricedStep:
    """The same step, priced with no operator marked as deciding."""
    with patch.object(JointGraph, "decisions", frozenset()):
        traced = replace(step.traced, regions=tuple(replace(region) for region in step.traced.regions))
        return PricedStep.of(traced, step.settings)


def record(name: str, backend: str, device: str) -> dict[str, Any]:
    """The figures of one model: bytes that its graph holds at the peak, without what a step holds beside it, and times
    as fractions of the plain step's."""
    model, batch = build(name)
    priced = memopt.plan(model, 1000, batch, backend=backend, device=device, allow={"recompute"}).priced
    assert priced is not None
    marked, free = priced.problem, without_marks(priced).problem
    least, least_free = (joined.smallest.peak_bytes for joined in (marked, free))
    plain = simulate(marked.problem, Schedule.save_all(marked.problem)).peak_bytes
    budget = round(least + HALF * (plain - least))
    half, half_free = (joined.portfolio.solve(budget) for joined in (marked, free))
    rows = decision_rows(marked, priced, half.schedule)
    return {
        "operators": sorted({row.operator for row in rows}),
        "calls": sum(row.calls for row in rows),
        "regions": len(marked.prices),
        "plain": plain,
        "smallest": least,
        "smallest_unmarked": least_free,
        "saved_at_half": sum(row.saved_bytes for row in rows),
        "half": half.peak_bytes,
        "added_at_half": half.added_seconds / marked.problem.seconds,
        "added_at_half_unmarked": half_free.added_seconds / marked.problem.seconds,
    }


def shares(records: dict[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    """By model: the fraction by which the marks raise the smallest budget, the share of the marked values in the peak
    at half, and the difference in added time."""
    for name, found in records.items():
        if "smallest" in found:
            more = found["smallest"] / found["smallest_unmarked"] - 1
            slower = found["added_at_half"] - found["added_at_half_unmarked"]
            yield name, more, found["saved_at_half"] / found["half"], slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(MIXTURES))
    parser.add_argument("--backend", default="aten", choices=["aten", "inductor"])
    parser.add_argument("--device", default="h100")
    given = parser.parse_args()
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in given.only:
        try:
            found = record(name, given.backend, given.device)
        except Exception as error:  # a model that transformers cannot build here is told, and the others go on
            found = {"message": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
        document = {**document, **stamp()}
        document.setdefault(given.backend, {})[name] = found
        write_result(RESULT, document)
        print(name, found, flush=True)
    for backend in ("aten", "inductor"):
        rows = list(shares(document.get(backend, {})))
        for name, more, share, slower in rows:
            print(f"{backend} {name}: smallest {more:+.2%}, saved {share:.2%} of the step, time {slower:+.2%}")
        if rows:
            middle = [median(row[at] for row in rows) for at in (1, 2, 3)]
            print(f"{backend}, median of {len(rows)}: " + ", ".join(f"{value:+.2%}" for value in middle))


if __name__ == "__main__":
    main()
