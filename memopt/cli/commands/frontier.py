"""`memopt frontier`."""

from __future__ import annotations

import dataclasses

import click

from memopt.cli.job import Job, takes_job
from memopt.cli.output import check_file, show, show_json


@click.command("frontier")
@takes_job
@click.option("--points", default=20, show_default=True, help="How many budgets to solve for.")
@click.option("--picture", metavar="FILE", help="Also draw the curve: .svg, .png or .pdf; needs matplotlib.")
@click.option("--save", metavar="FILE", help="Also write the curve to a file that memopt.Frontier.load reads.")
def command(job: Job, points: int, picture: str | None, save: str | None) -> None:
    """Show the least added time for every budget, from the smallest that works for MODEL, and recipes by hand.

    The curve covers all budgets, so --budget-gb does not change it.

    \b
    Example:
      memopt frontier gpt2 --set n_layer=2 --points 5 --device h100
    """
    import memopt
    from memopt.show.frontier import parts

    check_file("--picture", picture)
    check_file("--save", save)
    prepared = job.prepare()
    frontier = memopt.frontier(prepared.model, prepared.meta_batch(), points=points, **prepared.options)
    if picture is not None:
        frontier.picture(picture)
    if save is not None:
        frontier.save(save)
    if job.json:
        figures = {one.name: getattr(frontier, one.name) for one in dataclasses.fields(frontier) if one.repr}
        for name in ("points", "recipes"):
            figures[name] = [dataclasses.asdict(row) for row in figures[name]]
        show_json({**figures, "effort": frontier.effort.name})
    else:
        show(*parts(frontier))
