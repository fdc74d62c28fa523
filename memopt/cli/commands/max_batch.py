"""`memopt max-batch`."""

from __future__ import annotations

from typing import Any

import click

from memopt.cli.job import Job, takes_job
from memopt.cli.output import show, show_json


@click.command("max-batch")
@takes_job
@click.option("--multiple-of", default=1, show_default=True, help="Only multiples of this are tried.")
@click.option("--at-most", type=int, help="The largest batch to try.")
@click.option("--max-added-time", type=float, metavar="SHARE", help="The most added time, 0.3 for 30%.")
def command(job: Job, multiple_of: int, at_most: int | None, max_added_time: float | None) -> None:
    """Find the largest batch of MODEL that fits the budget. The batch is the first size of the shapes.

    \b
    Example:
      memopt max-batch gpt2 --set n_layer=1 --budget-gb 4 --device rtx-3060 --at-most 24 --multiple-of 8
    """
    import memopt

    prepared = job.prepare()
    batch = next(iter(prepared.shapes.values())).sizes[0]

    def make_inputs(size: int) -> Any:
        shapes = {
            name: shape.with_batch(size) if shape.sizes[0] == batch else shape
            for name, shape in prepared.shapes.items()
        }
        return prepared.batch(lambda name: shapes[name].meta())

    largest = memopt.max_batch(
        prepared.model,
        prepared.budget_gb,
        make_inputs,
        multiple_of=multiple_of,
        at_most=at_most,
        max_added_time=max_added_time,
        **prepared.options,
    )
    if job.json:
        show_json({"fits": True, "max_batch": largest, "budget_gb": prepared.budget_gb})
    else:
        rest = ", ".join(f"{name}={shape.with_batch(largest)}" for name, shape in prepared.shapes.items())
        name = type(prepared.model).__name__
        show(f"{name}: the largest batch within {prepared.budget_gb:.6g} GB is {largest} ({rest})")
