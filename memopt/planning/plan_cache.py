"""Plans that were made earlier and are on disk, or that another rank made: how they are read, checked against the
graphs that are to run, and agreed on by all ranks.

Files are not trusted: one that does not hold what `keep` or `note` wrote under its name is deleted, and the call is
planned as if there were none. Plans are not trusted either: a plan's schedule is simulated, and every figure by which
its step runs or is refused is computed again."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memopt.account.account import Account, breakdown
from memopt.compat.ddp import shared_store
from memopt.disk_cache import as_json, cache_folder, opened, read_json, sealed, value_from, warn_not_kept, write_json
from memopt.planning.figures import recounted
from memopt.planning.joined import place_steps, within
from memopt.planning.plan import Plan
from memopt.planning.priced_step import PricedStep
from memopt.planning.refit import Footprint, as_compiled
from memopt.planning.schedule_parts import held_after_forward, split
from memopt.planning.stages import StepOfPlan
from memopt.solver import Schedule, simulate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

KeptT = TypeVar("KeptT")


def is_sound(plan: Plan, footprint: Footprint | None, own: Account, to_come: int) -> bool:
    """Whether a plan that was read from disk can be trusted: its schedule is valid for its graphs, its figures follow
    from the schedule, and its peak is within its budget.

    Args:
        footprint: the bytes that the compiled graphs hold; None where they are not compiled.
        own: the account of the step, which includes neither the allocator's overhead nor what later forwards hold.
        to_come: the number of further forwards that hold as much as this one until the backward."""
    step, schedule = plan.solved
    joined = step.problem
    try:
        simulate(joined.problem, schedule, joined.link)
    except ValueError:  # no schedule of this problem
        return False
    if place_steps(joined, schedule) != (schedule, frozenset()) or split(joined, step.traced, schedule) != plan.regions:
        return False
    if footprint is not None:
        counted = as_compiled(plan, [footprint])
    else:
        counted = recounted(plan, plan.account, held_bytes=held_after_forward(joined.problem, schedule))
    if counted != plan:
        return False
    lowering = own.lowering if footprint is None else counted.account.lowering
    waiting = own.other_forwards + to_come * plan.held_bytes
    bare = replace(own, lowering=lowering, other_forwards=waiting, expandable=plan.account.expandable)
    if footprint is None:
        account = within(joined, schedule, bare, plan.budget_bytes)
    else:
        account = as_compiled(replace(plan, account=bare), [footprint]).account
    if account is None:
        return False
    may_differ = ("elsewhere", "other_forwards", "rounding", "fragmentation", "card_state")
    same = replace(account, **{name: getattr(plan.account, name) for name in may_differ})
    return plan.account == same and breakdown(joined.problem, schedule, account).peak_bytes <= plan.budget_bytes


_MOST = 256
"""The number of files that are kept, the newest ones."""


@dataclass(frozen=True)
class Kept:
    """A plan as it is stored on disk, with what is no part of a plan's own file."""

    plan: Plan
    """The plan, without graphs."""
    schedule: Schedule
    lever_set: int
    """The index of its lever set among the planner's lever sets."""
    footprint: Footprint | None = None
    """The bytes that its compiled graphs hold, where these are found by compiling."""

    def live(self, step: Callable[[], PricedStep]) -> Plan:
        """The plan with its graphs: `step` is called to capture and price them when they are first needed."""
        return replace(self.plan, schedule=self.schedule, source=StepOfPlan(step))


def is_on() -> bool:
    """Whether plans are read from and written to disk: not with `MEMOPT_CACHE=0` in the environment."""
    return os.environ.get("MEMOPT_CACHE", "1") != "0"


def find(key: str | None, kind: type[KeptT]) -> KeptT | None:
    """The value of type `kind` that `keep` stored under `key`, if any; a file that holds no such value is deleted."""
    return _read(key, lambda value: value_from(kind, _unpacked(value) if isinstance(value, str) else value))


def keep(key: str | None, kept: DataclassInstance, *, packed: bool = False) -> None:
    """Store a value under `key` (None: do nothing), compressed if `packed`; warns once where it cannot."""
    if key is not None:
        _write(key, _packed(kept) if packed else as_json(kept))


def noted_key(sketch: str | None) -> str | None:
    """The key that `note` last stored under `sketch` (see `PlanJob.sketch`); None where it has stored none."""
    return _read(sketch, _key_of)


def note(sketch: str | None, key: str | None) -> None:
    """Store the key of a call's plan under its sketch, if both are known: `noted_key` finds it before capture."""
    if sketch is not None and key is not None:
        _write(sketch, key)


def drop(key: str | None) -> None:
    """Delete the file of `key`, which does not hold what it should; does nothing where `key` is None."""
    if key is not None:
        with contextlib.suppress(OSError):
            _path(key).unlink(missing_ok=True)


def _key_of(value: Any) -> str:
    """`value`, which is a key. Raises `ValueError` for anything else, such as a path."""
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{64}", value) is None:
        raise ValueError("the value is no key")
    return value


def _read(name: str | None, made: Callable[[Any], Any]) -> Any | None:
    """`made(value)` for the value written under a name, if any; a file that holds anything else is deleted."""
    if name is None:
        return None
    try:
        values = opened(read_json(_path(name)))
        if values.get("name") != name:
            raise ValueError("the file holds what was stored under another name")
        return made(values.get("value"))
    except OSError:
        return None
    except (ValueError, RecursionError):
        drop(name)
        return None


def _write(name: str, value: Any) -> None:
    try:
        write_json(_path(name), sealed({"name": name, "value": value}))
        files = sorted((cache_folder() / "plans").glob("*.json"), key=_age, reverse=True)
        for file in files[_MOST:]:
            file.unlink(missing_ok=True)
    except OSError as error:
        warn_not_kept("plans", str(error))


def _path(name: str) -> Path:
    """The file of a key or a sketch. Raises `OSError` where the user has no home and named no folder."""
    return cache_folder() / "plans" / f"{name}.json"


def _age(file: Path) -> Any:
    """The time of a file's last change in seconds; 0 where the file is gone."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def agreed(key: str, kept: Kept) -> Kept:
    """The plan that all ranks use for `key`: that of the rank that called this first, which may be `kept` itself.
    Outside of a process group it is `kept`.

    Plans of ranks differ where they measured other times, or searched for a limited time. No rank waits for another: a
    rank with other shapes has other keys."""
    store = shared_store()
    if store is None:
        return kept
    own = _packed(kept)
    first: bytes = store.compare_set(f"memopt/{key}", "", own)
    return kept if first == own.encode() else value_from(Kept, _unpacked(first))


def _packed(value: DataclassInstance) -> str:
    return base64.b64encode(zlib.compress(json.dumps(as_json(value)).encode())).decode()


def _unpacked(text: str | bytes) -> Any:
    """The JSON value of `_packed`. Raises `ValueError` for any other text."""
    try:
        return json.loads(zlib.decompress(base64.b64decode(text)))
    except zlib.error as error:
        raise ValueError(str(error)) from None
