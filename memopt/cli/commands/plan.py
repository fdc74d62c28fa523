"""`memopt plan`."""

from __future__ import annotations

import click

from memopt.cli.job import Job, takes_job
from memopt.cli.output import check_file, plan_figures, show, show_json
from memopt.cli.planned import planned


@click.command("plan")
@takes_job
@click.option("--save", metavar="FILE", help="Also write the plan to a file that memopt.Plan.load reads.")
def command(job: Job, save: str | None) -> None:
    r"""Plan a training step of MODEL within a budget, and show where every byte goes.

    \b
    Examples:
      memopt plan gpt2 --budget-gb 8 --shape input_ids=4x512:int64 --device rtx-4090
      memopt plan vit --budget-gb 4 --shape pixel_values=32x3x224x224 --device t4 --effort fast
      memopt plan torch.nn:TransformerEncoderLayer --set d_model=512 --set nhead=8 \
        --shape 128x32x512 --shape target=128x32x512 --loss mse_loss --device l4
    """
    from memopt.show.report import parts

    check_file("--save", save)
    plan = planned(job)
    if save is not None:
        plan.save(save)
    if job.json:
        show_json(plan_figures(plan))
    else:
        show(*parts(plan))
