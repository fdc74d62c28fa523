"""`memopt report`."""

from __future__ import annotations

from pathlib import Path

import click

from memopt.cli.failures import UsageError
from memopt.cli.job import Job, takes_job
from memopt.cli.output import check_file, plan_figures, show, show_json
from memopt.cli.planned import planned


@click.command("report")
@takes_job
@click.option("--to", metavar="FILE", default="memopt.html", show_default=True, help="The page to write.")
@click.option("--frontier", metavar="POINTS", type=int, help="Also solve for that many budgets, and show the curve.")
def command(job: Job, to: str, frontier: int | None) -> None:
    """Write one HTML page about the plan of MODEL; it needs no network and no other file.

    It shows the budget, memory over the step, bytes by module, what the plan changes, precision and all operators.

    \b
    Example:
      memopt report gpt2 --set n_layer=1 --device h100 --budget-gb 2 --to gpt2.html
    """
    if Path(to).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--to takes a file named *.html, not {to!r}")
    check_file("--to", to)
    plan = planned(job)
    plan.report(to, frontier=None if frontier is None else plan.frontier(frontier))
    if job.json:
        show_json({**plan_figures(plan), "page": to})
    else:
        from memopt.show.report import headline
        from memopt.units import size

        show(headline(plan), f"written: {to}, {size(Path(to).stat().st_size)}")
