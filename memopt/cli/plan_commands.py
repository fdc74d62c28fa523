"""The commands that show one plan: `memopt plan`, `explain`, `diff`, `report` and `export`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.early import UsageError
from memopt.cli.job import Job, takes_job
from memopt.cli.output import answer, check_file, columns, plan_figures, show_json

if TYPE_CHECKING:
    from networkx import DiGraph

    from memopt.planning.plan import Plan
    from memopt.terminal import RenderableType

_OPENED_BY = {
    "snapshot": "pytorch.org/memory_viz opens this file",
    "trace": "ui.perfetto.dev and chrome://tracing open this file",
    "dot": "Graphviz (dot -Tsvg) and netron.app open this file",
}


@click.command("plan", short_help="Plan a training step within a budget.")
@takes_job
@click.option("--save", metavar="FILE", help="Also write the plan to a file that memopt.Plan.load reads.")
def plan(job: Job, save: str | None) -> None:
    """Plan a training step of MODEL within a budget, and show where every byte goes.

    \b
    Examples:
      memopt plan gpt2 --budget-gb 8 --shape input_ids=4x512:int64 --device rtx-4090
      memopt plan vit --budget-gb 4 --shape pixel_values=32x3x224x224 --device t4 --effort fast
      memopt plan torch.nn:TransformerEncoderLayer --set d_model=512 --set nhead=8 \\
        --shape 128x32x512 --shape target=128x32x512 --loss mse_loss --device l4
    """
    from memopt.cli.kept import planned
    from memopt.show.report import parts

    check_file("--save", save)
    plan = planned(job).plan
    if save is not None:
        plan.save(save)
    answer(job, plan_figures(plan), *parts(plan, columns()))


@click.command("explain", short_help="Say where the bytes go, what memopt changed, and why an op is treated as it is.")
@takes_job
@click.option(
    "--op",
    metavar="NAME",
    help="Explain one operator only: a name that the tables show, or a part of an operator's or a module's name.",
)
def explain(job: Job, op: str | None) -> None:
    """Say where the bytes of MODEL go, what memopt changed and why; or, with --op, explain one operator.

    MODEL may also be the file of a saved plan, or a snapshot of torch's memory history
    (torch.cuda.memory._dump_snapshot, *.pickle) of any run, also of one that ran out of memory: it says what filled
    the card, and what memopt would do about it.

    \b
    Examples:
      memopt explain gpt2 --set n_layer=2 --device h100 --budget-gb 5
      memopt explain gpt2 --set n_layer=2 --device h100 --budget-gb 5 --op h.0.attn.c_proj
    """
    from memopt.cli.kept import planned
    from memopt.show.op_story import story_of

    if _explain_file(job, op):
        return
    found = planned(job)
    plan, graph = found.plan, found.graph
    if op is not None:
        figures, tables = story_of(graph, op, plan.hardware)
        answer(job, figures, *tables)
    else:
        figures = {**plan_figures(plan), "levers_in_use": _lever_figures(plan)}
        answer(job, figures, *_explained(plan, graph))


def _explain_file(job: Job, op: str | None) -> bool:
    """Explain the file that `job` names in place of a model, if it is a saved plan or a snapshot of torch's memory
    history; returns whether it is. Raises `UsageError` where --op (`op`) or another option is given."""
    from memopt.disk_cache import read_json
    from memopt.planning.plan import Plan
    from memopt.show.memory_history import history_parts, read_history
    from memopt.show.report import parts

    path = Path(job.model)
    values = read_json(path) if path.suffix == ".json" else None
    is_plan = isinstance(values, dict) and "format" in values  # else it may be the configuration of a model
    if not is_plan and path.suffix not in (".pickle", ".pkl"):
        return False
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if op is not None or replace(job, json=False, debug=False) != Job(job.model):
        raise UsageError(f"{path} is shown as it is, not planned again: leave out all options but --json")
    if is_plan:
        plan = Plan.load(path)
        answer(job, plan_figures(plan), *parts(plan, columns()))
    else:
        history = read_history(path)
        figures = {**asdict(history), "rows": history.rows, "advice": history.advice}
        answer(job, figures, *history_parts(history, job.model))
    return True


def _explained(plan: Plan, graph: DiGraph) -> list[RenderableType]:
    """A plan as `memopt explain` prints it."""
    from memopt.show.op_story import values_table
    from memopt.show.report import bytes_table, headline, receipt_table
    from memopt.units import size

    levers = [
        f"{lever['name']}: {lever['what']} Losses and gradients: {lever['exactness']}. Price: {lever['price']}."
        for lever in _lever_figures(plan)
    ]
    spare = size(plan.budget_bytes - plan.predicted_peak_bytes).replace("–", "nothing")
    rest = f"{plan.model} has room for {spare} more within this budget."
    receipt: list[RenderableType] = [receipt_table(plan)] if plan.receipt else []
    notes = [f"note: {note}" for note in plan.notes]
    return [headline(plan), rest, "", bytes_table(plan), "", values_table(graph), "", *receipt, *levers, "", *notes]


def _lever_figures(plan: Plan) -> list[dict[str, Any]]:
    """For each lever that the plan uses: its name, what it does, how exact it is and its price, for JSON."""
    from memopt import LEVERS

    used = dict.fromkeys([*(row.lever for row in plan.receipt), *plan.levers, *plan.proposals])
    known = {name: LEVERS[name] for name in used if name in LEVERS}
    told = ("what", "exactness", "price")
    return [{"name": name, **{field: getattr(lever, field) for field in told}} for name, lever in known.items()]


@click.command("diff", short_help="Show what the plan changes in the model's graph.")
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
    help="Compare with the plan for this budget: show what only one of the two changes.",
)
@click.option("--order", is_flag=True, help="Show also operators that only moved or were renamed.")
def diff(job: Job, stage: str | None, against: str | None, order: bool) -> None:
    """Show what the plan changes in MODEL, by module, and why; or how it differs from the plan for another budget.

    \b
    Examples:
      memopt diff gpt2 --set n_layer=2 --device cpu --budget-gb 2.8
      memopt diff gpt2 --set n_layer=2 --device cpu --budget-gb 2.8 --against-budget-gb 3.2
    """
    if against is not None:
        from memopt.cli.early import gigabytes

        gigabytes("--against-budget-gb", against)
    from memopt.cli.kept import planned

    found = planned(job)
    other = planned(replace(job, budget_gb=against)) if against is not None else None
    diff = found.diff(other, order=order)
    if stage is None:
        answer(job, {"summary": diff.summary(), "changes": [asdict(change) for change in diff.changes]}, diff)
        return
    lines = diff.of_stage(stage)
    if job.json:
        show_json({"stage": stage, "summary": lines.summary(), "diff": str(lines)})
    else:
        colours = {"+": "green", "-": "red"}  # which click drops outside a terminal
        texts = [(line, colours.get(line[:1])) for line in str(lines).splitlines()]
        click.echo("\n".join(click.style(line, fg=colour) if colour else line for line, colour in texts))


@click.command("report", short_help="Write one HTML page about the plan.")
@takes_job
@click.option("--to", metavar="FILE", default="memopt.html", show_default=True, help="The page to write.")
@click.option("--frontier", metavar="POINTS", type=int, help="Also solve for that many budgets, and show the curve.")
@click.option("--cards", is_flag=True, help="Also plan for the other cards, and show what they would do.")
def report(job: Job, to: str, frontier: int | None, cards: bool) -> None:
    """Write one HTML page about the plan of MODEL; it needs no network and no other file.

    It shows the budget, memory over the step, bytes by module, what the plan changes, precision and all operators.

    \b
    Example:
      memopt report gpt2 --set n_layer=1 --device h100 --budget-gb 2 --to gpt2.html
    """
    if Path(to).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--to takes a file named *.html, not {to!r}")
    check_file("--to", to)
    from memopt.cli.kept import planned
    from memopt.show.page import page, write_page

    found = planned(job)
    curve = None if frontier is None else found.live.frontier(frontier)
    others = found.live.cards() if cards else ()
    write_page(Path(to), page(found.plan, found.step, found.diff(), found.recipes, curve, others))
    _show_file(job, found.plan, to, {"page": to})


def _show_file(job: Job, plan: Plan, file: str, figures: dict[str, str], more: str = "") -> None:
    """Print the plan and the file that was written: as JSON with `figures`, else with its size and the text `more`."""
    from memopt.show.report import headline
    from memopt.units import size

    written = f"written: {file}, {size(Path(file).stat().st_size)}{more}"
    answer(job, {**plan_figures(plan), **figures}, headline(plan), written)


@click.command("export", short_help="Write the step for PyTorch's memory visualiser, Perfetto, Graphviz or Netron.")
@takes_job
@click.option("--to", metavar="FILE", required=True, help="The file to write; its name says the format.")
@click.option("--format", "form", type=click.Choice(tuple(_OPENED_BY)), help="The format, for another name.")
def export(job: Job, to: str, form: str | None) -> None:
    """Write the planned step of MODEL into a file for another tool.

    \b
    snapshot (.pickle)  PyTorch's memory visualiser, pytorch.org/memory_viz
    trace (.json)       Perfetto and chrome://tracing
    dot (.dot)          Graphviz and Netron: the joint graph, coloured by what is saved, recomputed, …

    \b
    Examples:
      memopt export gpt2 --set n_layer=1 --device h100 --budget-gb 2 --to step.pickle
      memopt export gpt2 --set n_layer=1 --device h100 --budget-gb 2 --format trace --to step.trace
    """
    from memopt.show.exports import format_of, write_export

    try:
        chosen = format_of(Path(to), form)
    except ValueError as error:
        raise UsageError(f"--to: {error}") from error
    check_file("--to", to)
    from memopt.cli.kept import planned

    found = planned(job)
    write_export(Path(to), chosen, lambda: found.step, lambda: found.graph)
    _show_file(job, found.plan, to, {"file": to, "format": chosen}, f"; {_OPENED_BY[chosen]}")
