"""`memopt diff`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from memopt.cli.job import Job, takes_job
from memopt.cli.output import show, show_json
from memopt.cli.planned import planned

if TYPE_CHECKING:
    from memopt.planning.plan_graphs import StageDiff


@click.command("diff")
@takes_job
@click.option(
    "--stage",
    metavar="STAGE",
    help="Line by line, one stage: scheduled, operators, precision, forward, backward, joint, or the name of a pass.",
)
@click.option(
    "--against-budget-gb",
    "against",
    metavar="GB",
    help="Show what only this plan changes, and what only the plan within this other budget does.",
)
@click.option("--order", is_flag=True, help="Show also what only moved or was renamed.")
def command(job: Job, stage: str | None, against: str | None, order: bool) -> None:
    """Show what the plan changes in MODEL, by module, and why; or how it differs from the plan for another budget.

    \b
    Examples:
      memopt diff gpt2 --set n_layer=2 --device cpu --budget-gb 2.8
      memopt diff gpt2 --set n_layer=2 --device cpu --budget-gb 2.8 --against-budget-gb 3.2
    """
    if against is not None:
        _check_gigabytes(against)
    plan = planned(job)
    other = planned(replace(job, budget_gb=against)) if against is not None else None
    if stage is not None:
        _show_stage(plan.diff(other).of_stage(stage) if other else plan.diff(stage, order=order), stage, job)
        return
    diff = plan.diff(other, order=order)
    if job.json:
        show_json({"summary": diff.summary(), "changes": [asdict(change) for change in diff.changes]})
    else:
        show(diff)


def _check_gigabytes(against: str) -> None:
    from memopt.cli.named_cards import gigabytes

    gigabytes("--against-budget-gb", against)


def _show_stage(lines: StageDiff, stage: str, job: Job) -> None:
    if job.json:
        show_json({"stage": stage, "summary": lines.summary(), "diff": str(lines)})
    else:
        click.echo("\n".join(map(_coloured, str(lines).splitlines())))


def _coloured(line: str) -> str:
    """The line in green where it is added, in red where it is taken away; click drops colours outside a terminal."""
    colour = {"+": "green", "-": "red"}.get(line[:1])
    return click.style(line, fg=colour) if colour else line
