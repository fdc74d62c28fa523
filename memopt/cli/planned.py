"""The plan of a job, which several commands show in different ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.cli.output import refusal_figures, show_json

if TYPE_CHECKING:
    from memopt.cli.job import Job
    from memopt.planning.plan import Plan


def planned(job: Job) -> Plan | None:
    """The plan of a job; None where none fits and the job wants JSON, after the refusal has been printed as such.

    Raises `UsageError`, and what `memopt.plan` raises.
    """
    import memopt

    prepared = job.prepare()
    try:
        return memopt.plan(prepared.model, prepared.budget_gb, prepared.meta_batch(), **prepared.options)
    except memopt.BudgetError as error:
        if not job.json:
            raise
        show_json(refusal_figures(error))
        return None
