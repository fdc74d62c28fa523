"""The commands that find the largest size that fits: `memopt max-batch` and `memopt max-length`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.failures import UsageError
from memopt.cli.job import Job, Prepared, takes_job
from memopt.cli.output import answer

if TYPE_CHECKING:
    from memopt.cli.shapes import Shape

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
