"""`memopt diff`."""

from __future__ import annotations

from dataclasses import asdict

import click

from memopt.cli.failures import DOES_NOT_FIT
from memopt.cli.job import Job, takes_job
from memopt.cli.output import show, show_json
from memopt.cli.planned import planned


@click.command("diff")
@takes_job
@click.option(
    "--stage",
    metavar="STAGE",
    help="Line by line, one stage: scheduled, operators, precision, forward, backward, joint, or the name of a pass.",
)
@click.option("--order", is_flag=True, help="Show also what only moved or was renamed.")
def command(job: Job, stage: str | None, order: bool) -> int | None:
    """Show what the plan changes in MODEL, by module, and why.

    \b
    Example:
      memopt diff gpt2 --set n_layer=2 --device cpu --budget-gb 2.8
    """
    plan = planned(job)
    if plan is None:
        return DOES_NOT_FIT
    if stage is not None:
        lines = plan.diff(stage, order=order)
        if job.json:
            show_json({"stage": stage, "summary": lines.summary(), "diff": str(lines)})
        else:
            click.echo("\n".join(map(_coloured, str(lines).splitlines())))
        return None
    diff = plan.diff(order=order)
    if job.json:
        show_json({"summary": diff.summary(), "changes": [asdict(change) for change in diff.changes]})
    else:
        show(diff)
    return None


def _coloured(line: str) -> str:
    """The line in green where it is added, in red where it is taken away; click drops colours outside a terminal."""
    colour = {"+": "green", "-": "red"}.get(line[:1])
    return click.style(line, fg=colour) if colour else line
