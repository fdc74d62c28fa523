"""The command `memopt`, and its subcommands `frontier`, `max-batch`, `max-length` and `cards`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.check_commands import check, lock
from memopt.cli.early import UsageError
from memopt.cli.job import Job, Prepared, takes_job
from memopt.cli.output import answer, check_file, show, show_json
from memopt.cli.plan_commands import diff, explain, export, plan, report

if TYPE_CHECKING:
    from memopt.cli.shapes import Shape

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
    figures = {one.name: getattr(frontier, one.name) for one in fields(frontier) if one.repr}
    for name in ("points", "recipes"):
        figures[name] = [asdict(row) for row in figures[name]]
    answer(job, {**figures, "effort": frontier.effort.name}, *parts(frontier))


_OPTIONS = (
    click.option("--multiple-of", default=1, show_default=True, help="Only multiples of this are tried."),
    click.option("--at-most", type=int, help="The largest size to try."),
    click.option("--max-added-time", type=float, metavar="SHARE", help="The most added time, 0.3 for 30%."),
)


def _takes_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("max-batch", short_help="Find the largest batch that fits.")
@takes_job
@_takes_limits
def max_batch(job: Job, multiple_of: int, at_most: int | None, max_added_time: float | None) -> None:
    """Find the largest batch of MODEL that fits the budget. The batch is the first size of the shapes.

    \b
    Example:
      memopt max-batch gpt2 --set n_layer=1 --budget-gb 4 --device rtx-3060 --at-most 24 --multiple-of 8
    """
    import memopt

    prepared = job.prepare()
    first = next(iter(prepared.shapes.values()))
    if not first.sizes:
        raise UsageError("the first input is a single number, without a batch dimension; give another input first")
    batch = first.sizes[0]

    def sized(shape: Shape, size: int) -> Shape:
        return replace(shape, sizes=(size, *shape.sizes[1:])) if shape.sizes[:1] == (batch,) else shape

    limits = {"multiple_of": multiple_of, "at_most": at_most, "max_added_time": max_added_time}
    _show_largest(job, prepared, "batch", sized, memopt.max_batch, limits, "the search ends at --at-most; more may fit")


@click.command("max-length", short_help="Find the longest sequence that fits.")
@takes_job
@_takes_limits
def max_length(job: Job, multiple_of: int, at_most: int | None, max_added_time: float | None) -> None:
    """Find the longest sequence of MODEL that fits the budget. The length is the second size of the shapes.

    Where --at-most is left out, it is the most positions that the configuration of the model allows.

    \b
    Example:
      memopt max-length gpt2 --set n_layer=1 --shape input_ids=4x64 --budget-gb 2 --device h100 --multiple-of 512
    """
    import memopt
    from memopt.cli.shapes import most_positions

    prepared = job.prepare()
    first = next(iter(prepared.shapes.values()))
    if len(first.sizes) < 2:
        raise UsageError(f"the first input has no length: its shape is {first}; give --shape NAME=BATCHxLENGTH")
    length = first.sizes[1]

    def sized(shape: Shape, size: int) -> Shape:
        """The shape with the length replaced by `size`, in each dimension but the first: a mask may have it twice."""
        return replace(shape, sizes=(*shape.sizes[:1], *(size if one == length else one for one in shape.sizes[1:])))

    capped = "--at-most asks for no more"
    if at_most is None:
        at_most, capped = most_positions(prepared.model), "its configuration allows no more positions"
    limits = {"multiple_of": multiple_of, "at_most": at_most, "max_added_time": max_added_time}
    _show_largest(job, prepared, "length", sized, memopt.max_length, limits, f"{capped}; more may fit")


def _show_largest(
    job: Job,
    prepared: Prepared,
    what: str,
    sized: Callable[[Shape, int], Shape],
    find: Callable[..., int],
    limits: dict[str, Any],
    capped: str,
) -> None:
    """Find the largest size, named `what`, that fits, and print it. `sized` gives it to a shape, `find` looks for it;
    `capped` is the text for a search that ended at the limit."""

    def shapes(size: int) -> dict[str, Shape]:
        return {name: sized(shape, size) for name, shape in prepared.shapes.items()}

    def make_inputs(size: int) -> Any:
        found = shapes(size)
        return prepared.batch(lambda name: found[name].meta())

    largest = find(prepared.model, prepared.budget_gb, make_inputs, **limits, **prepared.options)
    most = limits["at_most"]
    at_limit = most is not None and largest + limits["multiple_of"] > most
    found = {"fits": True, f"max_{what}": largest, "budget_gb": prepared.budget_gb, "limited_by_at_most": at_limit}
    rest = ", ".join(f"{name}={shape}" for name, shape in shapes(largest).items())
    name, within = type(prepared.model).__name__, f"within {prepared.budget_gb:.6g} GB"
    alone = f"{name}: the largest {what} {within} is {largest} ({rest})"
    answer(job, found, f"{name}: a {what} of {largest} fits {within}, and {capped} ({rest})" if at_limit else alone)


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
