"""`memopt diff`."""

from __future__ import annotations

import click

from memopt.cli.failures import DOES_NOT_FIT
from memopt.cli.job import Job, takes_job
from memopt.cli.output import show_json
from memopt.cli.planned import planned


@click.command("diff")
@takes_job
@click.option(
    "--stage",
    default="scheduled",
    show_default=True,
    metavar="STAGE",
    help="scheduled: recomputation and offloads; operators: all rewrites; precision: dtypes; or the name of a pass.",
)
def command(job: Job, stage: str) -> int | None:
    """Show what the plan changes in the graph of MODEL.

    \b
    Example:
      memopt diff gpt2 --set n_layer=2 --device cpu --budget-gb 2.8
    """
    plan = planned(job)
    if plan is None:
        return DOES_NOT_FIT
    diff = plan.diff(stage)
    if job.json:
        show_json({"stage": stage, "summary": diff.summary(), "diff": str(diff)})
        return None
    click.echo("\n".join(map(_coloured, str(diff).splitlines())))
    click.echo(f"{stage}: {diff.summary()}")
    return None


def _coloured(line: str) -> str:
    """The line in green where it is added, in red where it is taken away; click drops colours outside a terminal."""
    colour = {"+": "green", "-": "red"}.get(line[:1])
    return click.style(line, fg=colour) if colour else line
