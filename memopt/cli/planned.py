"""The plan of a job, which several commands show in different ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.cli.job import Job
    from memopt.planning.plan import Plan


def planned(job: Job) -> Plan:
    """The plan of a job. Raises `UsageError`, and what `memopt.plan` raises."""
    import memopt

    prepared = job.prepare()
    return memopt.plan(prepared.model, prepared.budget_gb, prepared.meta_batch(), **prepared.options)
