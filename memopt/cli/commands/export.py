"""`memopt export`."""

from __future__ import annotations

from pathlib import Path

import click

from memopt.cli.failures import UsageError
from memopt.cli.job import Job, takes_job
from memopt.cli.output import check_file, plan_figures, show, show_json
from memopt.cli.planned import planned

FORMATS = ("snapshot", "trace", "dot")
_OPENED_BY = {
    "snapshot": "pytorch.org/memory_viz opens it",
    "trace": "ui.perfetto.dev and chrome://tracing open it",
    "dot": "Graphviz (dot -Tsvg) and netron.app open it",
}


@click.command("export")
@takes_job
@click.option("--to", metavar="FILE", required=True, help="The file to write; its name says the format.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="The format, for other names.")
def command(job: Job, to: str, form: str | None) -> None:
    """Write the planned step of MODEL into a file for another tool.

    \b
    snapshot (.pickle)  PyTorch's memory visualiser, pytorch.org/memory_viz
    trace (.json)       Perfetto and chrome://tracing
    dot (.dot)          Graphviz and Netron: the joint graph, with the fate of each node

    \b
    Examples:
      memopt export gpt2 --set n_layer=1 --device h100 --budget-gb 2 --to step.pickle
      memopt export gpt2 --set n_layer=1 --device h100 --budget-gb 2 --format trace --to step.trace
    """
    from memopt.show.exports import format_of

    try:
        chosen = format_of(Path(to), form)
    except ValueError as error:
        raise UsageError(f"--to: {error}") from error
    check_file("--to", to)
    plan = planned(job)
    plan.export(to, chosen)
    if job.json:
        show_json({**plan_figures(plan), "file": to, "format": chosen})
    else:
        from memopt.show.report import headline
        from memopt.units import size

        show(headline(plan), f"written: {to}, {size(Path(to).stat().st_size)}; {_OPENED_BY[chosen]}")
