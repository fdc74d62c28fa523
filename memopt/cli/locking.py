"""The file of a memory lock: the options that the step was named by on the command line, and the step's memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from memopt.checks.lock import LockCheck, MemoryLock, lock_step
from memopt.cli.early import FAILED, UsageError
from memopt.cli.job import Job
from memopt.cli.names import budget_gb, card_named
from memopt.cli.output import answer
from memopt.device import device_here, hardware_of
from memopt.errors import GIB
from memopt.planning.frontier import load, save
from memopt.planning.options import check_options


@dataclass(frozen=True)
class _LockFile:
    job: Job
    memory: MemoryLock


def write_lock(job: Job, path: str) -> None:
    """Write the memory lock of the step that a job describes to a file, and show its figures."""
    card = card_named(job.device) or hardware_of(device_here()).name
    # A later check plans the same on any machine.
    job = replace(job, device=card, budget_gb=f"{budget_gb(job.budget_gb, card):.17f}")
    memory = _locked(job)
    save(path, _LockFile(_named_by(job), memory))
    answer(job, {"file": path, **_figures(memory)}, str(LockCheck(memory, memory)), f"written: {path}")


def check_lock(job: Job, path: str) -> int | None:
    """Plan the step of a lock file again, and show how its figures grew, and why. Returns `FAILED` if one grew, else
    None. Raises `UsageError` if `job` has a model or options that are in the file."""
    if _named_by(job) != Job(model=""):
        raise UsageError(f"{path} names the model and its options: leave out MODEL and all options but --json")
    kept = load(path, _LockFile, "lock", "make it with memopt lock")
    checked = LockCheck(kept.memory, _locked(kept.job, enlarged=True))
    found = {"grown": checked.grown, "changed": checked.changed, "culprits": list(map(asdict, checked.culprits))}
    answer(job, {"locked": _figures(kept.memory), "now": _figures(checked.now), **found}, str(checked))
    return FAILED if checked.grown else None


def _named_by(job: Job) -> Job:
    """The job without the options that say how to print."""
    return replace(job, json=False, debug=False)


def _locked(job: Job, *, enlarged: bool = False) -> MemoryLock:
    """The lock of the step that a job describes, planned now; for `enlarged` see `lock_step`."""
    prepared = job.prepare()
    options = check_options(prepared.budget_gb, **prepared.options)
    return lock_step(prepared.model, prepared.meta_batch(), options, enlarged=enlarged)


def _figures(memory: MemoryLock) -> dict[str, Any]:
    peaks = {f"{name}_gb": getattr(memory, name) / GIB for name in ("plain", "planned", "smallest")}
    return {**peaks, "added_seconds": memory.added, "step_seconds": memory.seconds}
