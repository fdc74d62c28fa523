"""`memopt explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memopt.cli.job import Job, takes_job
from memopt.cli.output import plan_figures, show, show_json
from memopt.cli.planned import planned

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memopt.planning.plan import Plan


@click.command("explain")
@takes_job
@click.option(
    "--op",
    metavar="NAME",
    help="Tell the story of one op: a name that the tables show, or a part of an operator's or a module's name.",
)
def command(job: Job, op: str | None) -> None:
    """Say where the bytes of MODEL go, what memopt changed and why, or the story of one op.

    \b
    Examples:
      memopt explain gpt2 --set n_layer=2 --device h100 --budget-gb 5
      memopt explain gpt2 --set n_layer=2 --device h100 --budget-gb 5 --op h.0.attn.c_proj
    """
    from memopt.cli.op_story import story_of, values_table

    plan = planned(job)
    if op is not None:
        story = story_of(plan, op)
        if job.json:
            show_json(story.figures)
        else:
            show(*story.parts)
        return
    if job.json:
        show_json({**plan_figures(plan), "levers_in_use": _lever_figures(plan)})
    else:
        show(*_explained(plan, values_table(plan)))


def _explained(plan: Plan, values: RenderableType) -> list[RenderableType]:
    """Sentences and tables: the peak, the largest values, what the levers did and at what price, and the notes."""
    from memopt.show.report import bytes_table, headline, receipt_table

    levers = [
        f"{lever['name']}: {lever['what']} Losses and gradients: {lever['exactness']}. Price: {lever['price']}."
        for lever in _lever_figures(plan)
    ]
    rest = f"{plan.model} has room for {_spare(plan)} more within this budget."
    receipt: list[RenderableType] = [receipt_table(plan.receipt)] if plan.receipt else []
    notes = [f"note: {note}" for note in plan.notes]
    return [headline(plan), rest, "", bytes_table(plan), "", values, "", *receipt, *levers, "", *notes]


def _spare(plan: Plan) -> str:
    from memopt.units import size

    return size(plan.budget_bytes - plan.predicted_peak_bytes).replace("–", "nothing")


def _lever_figures(plan: Plan) -> list[dict[str, Any]]:
    """What is known of each lever of the receipt."""
    from memopt import LEVERS

    used = dict.fromkeys([*(row.lever for row in plan.receipt), *plan.levers, *plan.proposals])
    return [
        {
            "name": name,
            "what": LEVERS[name].what,
            "exactness": LEVERS[name].exactness,
            "price": LEVERS[name].price,
        }
        for name in used
        if name in LEVERS
    ]
