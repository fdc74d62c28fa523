"""The command `memopt`, and its subcommands `frontier` and `cards`."""

from __future__ import annotations

import dataclasses

import click

from memopt.cli.check_commands import check, lock
from memopt.cli.job import Job, takes_job
from memopt.cli.largest_commands import max_batch, max_length
from memopt.cli.output import answer, check_file, show, show_json
from memopt.cli.plan_commands import diff, explain, export, plan, report

_EPILOG = """\b
MODEL is one of
  gpt2, llama, bert, …            a model type of transformers, random weights
  BertForSequenceClassification   a class of transformers, random weights
  path/config.json                a configuration file of transformers
  bert-base-cased                 a model of the hub, from the local cache
  package.module:function         a function or class that gives the model, or
                                  a function that gives it with its inputs
  path/model.py:function          the same in a file

\b
Exit codes: 0 fits, 1 the model cannot be planned or a check failed,
2 bad usage, 3 no plan fits, 130 interrupted.

\b
Completion: eval "$(_MEMOPT_COMPLETE=bash_source memopt)", also zsh_source
and fish_source.
"""


@click.command("frontier", short_help="Show the least added time for every budget.")
@takes_job
@click.option("--points", default=20, show_default=True, help="How many budgets to solve for.")
@click.option("--picture", metavar="FILE", help="Also draw the curve: .svg, .png or .pdf; needs matplotlib.")
@click.option("--save", metavar="FILE", help="Also write the curve to a file that memopt.Frontier.load reads.")
def frontier(job: Job, points: int, picture: str | None, save: str | None) -> None:
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
    figures = {one.name: getattr(frontier, one.name) for one in dataclasses.fields(frontier) if one.repr}
    for name in ("points", "recipes"):
        figures[name] = [dataclasses.asdict(row) for row in figures[name]]
    answer(job, {**figures, "effort": frontier.effort.name}, *parts(frontier))


@click.command("cards", short_help="List the cards that can be planned for.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def cards(as_json: bool, debug: bool) -> None:
    """List the cards that can be planned for, with the rates that their makers state.

    \b
    Example:
      memopt cards
    """
    from memopt.device import hardware, known_hardware
    from memopt.errors import GIB
    from memopt.show.report import new_table
    from memopt.terminal import Column

    cards = [hardware(name) for name in known_hardware()]
    if as_json:
        show_json(
            [
                {
                    "name": card.name,
                    "memory_gb": card.memory_bytes / GIB,
                    "bytes_per_second": card.bytes_per_second,
                    "link_bytes_per_second": card.link_bytes_per_second,
                    "flops": dict(card.flops),
                    "source": card.source,
                }
                for card in cards
            ]
        )
        return
    right = ("memory GB", "GB/s", "TFLOPS fp32", "16 bits", "link GB/s")
    title = "Cards for --device; by default the budget is the card's memory"
    table = new_table(title, Column("name", no_wrap=True), right=right)
    for card in cards:
        half = max(card.flops.get("bfloat16", 0.0), card.flops.get("float16", 0.0))
        link = f"{card.link_bytes_per_second / 1e9:.4g}" if card.link_bytes_per_second else "–"
        rates = (f"{card.bytes_per_second / 1e9:,.0f}", f"{card.flops['float32'] / 1e12:.4g}", f"{half / 1e12:.5g}")
        table.add_row(card.name, f"{card.memory_bytes / GIB:.4g}", *rates, link)
    show(table, "link: copies to or from the host's memory. cpu: this machine. --json says where the rates come from.")


class _Subcommands(click.Group):
    """A group that lists its subcommands in the order in which they are given, each with its short help uncut."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help or "") for name, command in self.commands.items()])


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from memopt import __version__

        click.echo(f"memopt {__version__}")
        context.exit()


@click.command(
    cls=_Subcommands,
    commands=[plan, explain, diff, frontier, report, export, max_batch, max_length, lock, check, cards],
    epilog=_EPILOG,
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version)
@click.pass_context
def memopt(context: click.Context) -> None:
    """Fit the training step of a PyTorch model into a number of gigabytes, and see the plan.

    Nothing is run, downloaded or allocated to plan: models are built without memory, for any card.

    \b
    Example:
      memopt plan gpt2 --budget-gb 8 --device rtx-4090
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
