"""The commands that check: `memopt check` of real steps, and `memopt lock`, whose file `memopt check --lock` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memopt.cli.early import FAILED, UsageError
from memopt.cli.job import Job, Prepared, takes_job
from memopt.cli.output import answer, check_file

if TYPE_CHECKING:
    from memopt import AccountCheck, Comparison

# The largest error of gradients that passes the check; twice the error of torch.autocast where that is larger.
_GRADIENT_ERROR = 1e-3


@click.command("lock", short_help="Write the memory of a step to a file, for `memopt check --lock`.")
@takes_job
@click.option("--out", metavar="FILE", default="memory.lock", show_default=True, help="The file to write.")
def lock(job: Job, out: str) -> None:
    """Write the memory that the training step of MODEL holds, by module and line of code, to a file to be committed.

    Later, `memopt check --lock memory.lock` fails if the step holds more than that, and names the line of code. Neither
    needs a GPU.

    \b
    Example:
      memopt lock gpt2 --set n_layer=1 --device h100 --budget-gb 2 --out memory.lock
    """
    check_file("--out", out)
    from memopt.cli.locking import write_lock

    write_lock(job, out)


@click.command("check", short_help="Train a few steps here, and compare them with the plan and with the plain model.")
@takes_job
@click.option(
    "--lock", "locked", metavar="FILE", help="Train nothing: plan the step of a lock file again; fail if it holds more."
)
def check(job: Job, locked: str | None) -> int | None:
    """Train a few steps of MODEL on this machine, with random weights and inputs, and compare them with the plan's
    account and with the plain model.

    Needs memory for the plain step in addition to the budget. The exit code is 1 if the step held more than the budget,
    or if its gradients are further from the exact ones than rounding explains.

    With --lock, the step that `memopt lock` wrote is planned again, which needs no GPU; the exit code is 1 if a peak,
    the smallest budget or the added time grew by more than 1%. The lines of code that made it grow are named.

    \b
    Example:
      memopt check gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 \\
        --shape input_ids=2x64 --budget-gb 0.1 --precision fp32
    """
    if locked is not None:
        from memopt.cli.locking import check_lock

        return check_lock(job, locked)
    prepared = job.prepare()
    account, comparison = _trained(prepared)
    autocast = comparison.accuracies.autocast
    rounding = max(_GRADIENT_ERROR, 2 * autocast.gradient if autocast else 0.0)
    held = account.total.measured_bytes <= prepared.budget_gb * 1024**3
    exact = comparison.bitwise or comparison.accuracies.optimized.gradient <= rounding
    figures = {
        "within_budget": held,
        "gradients_right": exact,
        "bitwise": comparison.bitwise,
        "loss_error": comparison.loss_error,
        "rows": {
            row.name: {"predicted": row.predicted_bytes, "measured": row.measured_bytes}
            for row in (*account.rows, account.total)
        },
        "seconds": {"plain": comparison.plain.seconds, "planned": comparison.optimized.seconds},
    }
    budget = "The step stayed within the budget" if held else "THE STEP HELD MORE THAN THE BUDGET"
    verdict = f"{budget}, and {'its gradients are right.' if exact else 'ITS GRADIENTS ARE WRONG.'}"
    answer(job, figures, str(account), "", str(comparison), "", verdict)
    return None if held and exact else FAILED


def _trained(prepared: Prepared) -> tuple[AccountCheck, Comparison]:
    """The results of `memopt.check` and `memopt.compare`, by real steps of the model, which is built with memory and
    optimised for that. Raises `UsageError` for a device other than this machine's, and without an optimizer."""
    import torch

    import memopt
    from memopt.cli.shapes import highest_values
    from memopt.device import device_here

    device = device_here()
    options: dict[str, Any] = dict(prepared.options)
    named = options.pop("device")
    if named not in (None, device.type):
        raise UsageError(f"check trains on this machine's {device.type}, not on {named}; leave --device out")
    if options["optimizer"] is None:
        raise UsageError("check needs an optimizer; leave --optimizer out, or name one")
    torch.manual_seed(0)
    highest = highest_values(prepared.model, prepared.shapes)
    batch = prepared.batch(lambda name: prepared.shapes[name].random(device, highest[name]))
    torch.manual_seed(0)
    model = prepared.build()[0].to(device).train()
    memopt.optimize(model, prepared.budget_gb, example_inputs=batch, **options)
    names = {name.lower(): name for name in dir(torch.optim)}
    optimizer = getattr(torch.optim, names[options["optimizer"].lower()])(model.parameters())
    optimizer = memopt.wrap_optimizer(model, optimizer)
    return memopt.check(model, optimizer, batch), memopt.compare(model, batch)
