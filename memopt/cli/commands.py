"""The command `memopt`, and its subcommands that show more than one plan: `frontier`, `max-batch`, `check`, `cards`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.failures import FAILED, UsageError
from memopt.cli.job import Job, Prepared, takes_job
from memopt.cli.output import check_file, show, show_json
from memopt.cli.plan_commands import diff, explain, export, plan, report

if TYPE_CHECKING:
    from memopt import AccountCheck, Comparison

# Gradients may be this far from the reference, beside twice the error of torch.autocast where that was run.
_GRADIENT_ERROR = 1e-3
_EPILOG = """\b
MODEL is one of
  gpt2, llama, bert, …            a model type of transformers, random weights
  BertForSequenceClassification   a class of transformers, random weights
  path/config.json                a configuration file of transformers
  package.module:function         a function or class that gives the model
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
    if job.json:
        figures = {one.name: getattr(frontier, one.name) for one in dataclasses.fields(frontier) if one.repr}
        for name in ("points", "recipes"):
            figures[name] = [dataclasses.asdict(row) for row in figures[name]]
        show_json({**figures, "effort": frontier.effort.name})
    else:
        show(*parts(frontier))


@click.command("max-batch", short_help="Find the largest batch that fits.")
@takes_job
@click.option("--multiple-of", default=1, show_default=True, help="Only multiples of this are tried.")
@click.option("--at-most", type=int, help="The largest batch to try.")
@click.option("--max-added-time", type=float, metavar="SHARE", help="The most added time, 0.3 for 30%.")
def max_batch(job: Job, multiple_of: int, at_most: int | None, max_added_time: float | None) -> None:
    """Find the largest batch of MODEL that fits the budget. The batch is the first size of the shapes.

    \b
    Example:
      memopt max-batch gpt2 --set n_layer=1 --budget-gb 4 --device rtx-3060 --at-most 24 --multiple-of 8
    """
    import memopt

    prepared = job.prepare()
    batch = next(iter(prepared.shapes.values())).sizes[0]

    def make_inputs(size: int) -> Any:
        shapes = {
            name: shape.with_batch(size) if shape.sizes[0] == batch else shape
            for name, shape in prepared.shapes.items()
        }
        return prepared.batch(lambda name: shapes[name].meta())

    largest = memopt.max_batch(
        prepared.model,
        prepared.budget_gb,
        make_inputs,
        multiple_of=multiple_of,
        at_most=at_most,
        max_added_time=max_added_time,
        **prepared.options,
    )
    capped = at_most is not None and largest + multiple_of > at_most
    if job.json:
        found = {"fits": True, "max_batch": largest, "budget_gb": prepared.budget_gb, "limited_by_at_most": capped}
        show_json(found)
    else:
        rest = ", ".join(f"{name}={shape.with_batch(largest)}" for name, shape in prepared.shapes.items())
        name = type(prepared.model).__name__
        within = f"within {prepared.budget_gb:.6g} GB"
        if capped:
            show(f"{name}: a batch of {largest} fits {within}, and --at-most asks for no more; more may fit ({rest})")
        else:
            show(f"{name}: the largest batch {within} is {largest} ({rest})")


@click.command("check", short_help="Train a few steps here, and compare them with the plan and with the plain model.")
@takes_job
def check(job: Job) -> int | None:
    """Train a few steps of MODEL on this machine, with random weights and inputs, and compare them with the plan's
    account and with the plain model.

    Needs the memory of the plain step beside the budget. Ends with 1 if the step held more than the budget, or if its
    gradients are further from the exact ones than rounding explains.

    \b
    Example:
      memopt check gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 \\
        --shape input_ids=2x64 --budget-gb 0.1 --precision fp32
    """
    prepared = job.prepare()
    account, comparison = _trained(prepared)
    held, exact = _within_budget(account, prepared.budget_gb), _exact(comparison)
    if job.json:
        show_json(_figures(account, comparison, held, exact))
    else:
        show(str(account), "", str(comparison), "", _verdict(held, exact))
    return None if held and exact else FAILED


def _trained(prepared: Prepared) -> tuple[AccountCheck, Comparison]:
    """The checks of the model after it was built with memory and optimised."""
    import torch

    import memopt
    from memopt.device import device_here

    device = device_here()
    options: dict[str, Any] = dict(prepared.options)
    named = options.pop("device")
    if named not in (None, device.type):
        raise UsageError(f"check trains on this machine's {device.type}, not on {named}; leave --device out")
    if options["optimizer"] is None:
        raise UsageError("check needs an optimizer; leave --optimizer out, or name one")
    batch = _random_batch(prepared, device)
    torch.manual_seed(0)
    model = prepared.build().to(device).train()
    memopt.optimize(model, prepared.budget_gb, example_inputs=batch, **options)
    names = {name.lower(): name for name in dir(torch.optim)}
    optimizer = getattr(torch.optim, names[options["optimizer"].lower()])(model.parameters())
    optimizer = memopt.wrap_optimizer(model, optimizer)
    return memopt.check(model, optimizer, batch), memopt.compare(model, batch)


def _random_batch(prepared: Prepared, device: Any) -> Any:
    import torch

    from memopt.cli.shapes import highest_values

    torch.manual_seed(0)
    highest = highest_values(prepared.model, prepared.shapes)
    return prepared.batch(lambda name: prepared.shapes[name].random(device, highest[name]))


def _within_budget(account: AccountCheck, budget_gb: float) -> bool:
    return account.total.measured_bytes <= budget_gb * 1024**3


def _exact(comparison: Comparison) -> bool:
    """Whether the gradients are no further from the reference than rounding in their dtype explains."""
    known = comparison.accuracies
    if comparison.bitwise or known is None:
        return comparison.bitwise
    autocast = known.autocast.gradient if known.autocast else 0.0
    return known.optimized.gradient <= max(_GRADIENT_ERROR, 2 * autocast)


def _verdict(held: bool, exact: bool) -> str:
    budget = "The step stayed within the budget" if held else "THE STEP HELD MORE THAN THE BUDGET"
    return f"{budget}, and {'its gradients are right.' if exact else 'ITS GRADIENTS ARE WRONG.'}"


def _figures(account: AccountCheck, comparison: Comparison, held: bool, exact: bool) -> dict[str, Any]:
    rows = (*account.rows, account.total)
    return {
        "within_budget": held,
        "gradients_right": exact,
        "bitwise": comparison.bitwise,
        "loss_error": comparison.loss_error,
        "rows": {row.name: {"predicted": row.predicted_bytes, "measured": row.measured_bytes} for row in rows},
        "seconds": {"plain": comparison.plain.seconds, "planned": comparison.optimized.seconds},
    }


@click.command("cards", short_help="List the cards that can be planned for.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def cards(as_json: bool, debug: bool) -> None:
    """List the cards that can be planned for, with the rates that their makers state.

    \b
    Example:
      memopt cards
    """
    from rich.table import Column

    from memopt.device import hardware, known_hardware
    from memopt.errors import GIB
    from memopt.show.report import new_table

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
    title = "Cards: --device NAME; the default budget is the memory"
    table = new_table(title, Column("name", no_wrap=True), right=right)
    for card in cards:
        half = max(card.flops.get("bfloat16", 0.0), card.flops.get("float16", 0.0))
        link = f"{card.link_bytes_per_second / 1e9:.4g}" if card.link_bytes_per_second else "–"
        rates = (f"{card.bytes_per_second / 1e9:,.0f}", f"{card.flops['float32'] / 1e12:.4g}", f"{half / 1e12:.5g}")
        table.add_row(card.name, f"{card.memory_bytes / GIB:.4g}", *rates, link)
    show(table, "link: to the host's memory, each way. cpu: this machine's. --json says where the rates come from.")


class _Subcommands(click.Group):
    """Subcommands in the order in which they are given, each with the whole of its short help."""

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
    commands=[plan, explain, diff, frontier, report, export, max_batch, check, cards],
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
