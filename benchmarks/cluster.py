"""Llama 3.1 of 8, 70 and 405 billion parameters on 8 to 4,096 cards that are not here: what `memopt.plan` says of one
card within 80 GB, and the bytes that torchtitan published beside those that are predicted for its recipes.

    python -m benchmarks.cluster [--only published] [--models 8B 70B]

Published: github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3 and 4: H100 with 96
GB, sequences of 8,192 tokens. It reports the most that torch's allocator reserved. To what is predicted for one stream
are added the blocks that the allocator keeps for FSDP2's other streams, which no other stream can have: the shards of
gradients (made in the stream of reductions) and the buffer of the largest gather; and where the loss is parallel, one
more tensor of the logits' size, which torch's own loss makes (torch/distributed/tensor/parallel/loss.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stamp import stamp, write_result
from examples.models.checkpoints import FULL, SELECTIVE
from examples.models.cluster import CardFigures, CardStep, Job
from examples.models.llama import SIZES
from memopt.errors import GIB, BudgetError
from memopt.planning.stages import Priced

RESULT = Path(__file__).parent / "results" / "cluster.json"
BUDGET_GB, NETWORK = 80, "nvlink4+ib-ndr"
Record = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """A row of torchtitan's tables."""

    model: str
    mesh: dict[str, int]
    samples: int
    recipe: str
    technique: str
    gib: float
    tokens_per_second: float


PUBLISHED = (
    Published("8B", {"dp_shard": 8}, 2, SELECTIVE, "FSDP", 82.4, 5762),
    Published("8B", {"dp_shard": 8}, 2, SELECTIVE, "FSDP + torch.compile", 77.0, 6667),
    Published("8B", {"dp_shard": 128}, 2, SELECTIVE, "FSDP", 67.0, 5605),
    Published("8B", {"dp_shard": 128}, 2, SELECTIVE, "FSDP + torch.compile", 62.0, 6514),
    Published("70B", {"dp_shard": 32, "tp": 8}, 16, FULL, "2D + torch.compile + Float8", 71.9, 829),
    Published("70B", {"dp_shard": 32, "tp": 8}, 16, FULL, "2D + torch.compile + Float8 + AsyncTP", 67.6, 876),
)
CLUSTERS: dict[tuple[str, int, int], tuple[dict[str, int], ...]] = {
    ("8B", 1, 2): (
        {"dp_shard": 8},
        {"dp_shard": 64},
        {"dp_shard": 512},
        {"dp_shard": 4096},
        {"dp_replicate": 64, "dp_shard": 64},
    ),
    ("70B", 1, 1): ({"dp_shard": 8}, {"dp_shard": 64}, {"dp_shard": 512}, {"dp_shard": 4096}),
    ("70B", 8, 8): (
        {"dp_shard": 8, "tp": 8},
        {"dp_shard": 64, "tp": 8},
        {"dp_shard": 512, "tp": 8},
        {"dp_replicate": 8, "dp_shard": 64, "tp": 8},
    ),
    ("405B", 8, 2): (
        {"dp_shard": 1, "tp": 8},
        {"dp_shard": 8, "tp": 8},
        {"dp_shard": 64, "tp": 8},
        {"dp_shard": 512, "tp": 8},
        {"dp_replicate": 8, "dp_shard": 64, "tp": 8},
    ),
}
"""By model, cards of tensor parallelism and sequences of each group of these: the meshes of a table."""


def published() -> Iterator[Record]:
    """The records of torchtitan's rows, each with what is predicted."""
    steps: dict[tuple[str, int, int], CardStep] = {}
    for row in PUBLISHED:
        job = Job(SIZES[row.model], row.mesh, row.samples)
        key = row.model, job.mesh.get("tp", 1), row.samples
        if key not in steps:
            steps[key] = CardStep.of(job)
        figures = steps[key].over(row.mesh, NETWORK).under(row.recipe)
        beside = _other_streams(figures, steps[key].over(row.mesh, NETWORK)) + _parallel_loss(job)
        predicted = (figures.reserved_bytes + beside) / GIB
        yield {
            "model": row.model,
            "mesh": row.mesh,
            "samples": row.samples,
            "recipe": row.recipe,
            "technique": row.technique,
            "published_gib": row.gib,
            "predicted_gib": predicted,
            "of_them_beside_the_stream": beside / GIB,
            "difference": predicted / row.gib - 1,
            "published_tokens_per_second": row.tokens_per_second,
            "predicted_tokens_per_second": job.tokens / figures.step.seconds,
        }


def _other_streams(figures: CardFigures, step: CardStep) -> int:
    """Bytes that the allocator keeps for the streams of gathers and reductions, beyond those of the account."""
    sharding = step.priced.traced.sharded
    assert sharding is not None
    largest = max(group.gathered_bytes for group in sharding.groups)
    counted = max(group.gathered_bytes for group in sharding.blocks)
    return figures.account.gradients + largest - counted


def _parallel_loss(job: Job) -> int:
    """Bytes of the logits of one card in fp32, where the vocabulary is split over cards."""
    cards = job.mesh.get("tp", 1)
    return 4 * job.samples * job.length * job.size.words // cards if cards > 1 else 0


def planned(models: Sequence[str]) -> Iterator[Record]:
    """The records of the table of clusters."""
    for (model, _, samples), meshes in CLUSTERS.items():
        if model not in models:
            continue
        step = CardStep.of(Job(SIZES[model], meshes[0], samples))
        for mesh in meshes:
            job = Job(SIZES[model], mesh, samples)
            yield {
                "model": model,
                "mesh": mesh,
                "samples": samples,
                **_plan(job, step.over(mesh, NETWORK)),
            }


def _plan(job: Job, step: CardStep) -> Record:
    """The plan of a step within the budget, or the smallest one."""
    account = step.account
    static = account.parameters + account.gradients + account.optimizer_state
    figures: Record = {"static_gb": static / GIB, "gathered_gb": (account.gathered + account.exchange) / GIB}
    try:
        plan = Priced(step.priced, account).solve(BUDGET_GB * GIB)
    except BudgetError as refused:
        return {**figures, "smallest_gb": refused.smallest_bytes / GIB}
    assert plan.cluster is not None
    return {
        **figures,
        "peak_gb": plan.predicted_peak_gb,
        "plain_gb": plan.plain_peak_gb,
        "added_time": plan.added_time,
        "seconds": plan.cluster.seconds,
        "tokens_per_second": job.tokens / plan.cluster.seconds,
        "bounds": dict(plan.cluster.bounds),
        "gathers_seconds": plan.cluster.gathers_seconds,
        "reductions_seconds": plan.cluster.reductions_seconds,
    }


def main() -> None:
    """Measure what was asked for, and keep the other rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("published", "clusters"))
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    arguments = parser.parse_args()
    document: Record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if arguments.only != "clusters":
        document["published"] = list(map(_told, published()))
    if arguments.only != "published":
        kept = [row for row in document.get("clusters", []) if row["model"] not in arguments.models]
        document["clusters"] = [*kept, *map(_told, planned(arguments.models))]
    write_result(RESULT, {**stamp(), **document, "command": "python -m benchmarks.cluster"})


def _told(record: Record) -> Record:
    print(json.dumps(record), file=sys.stderr, flush=True)
    return record


if __name__ == "__main__":
    main()
