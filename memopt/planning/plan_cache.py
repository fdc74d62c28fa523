"""A cache of plans on disk, so that the second start of the same job plans nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from memopt.disk_cache import cache_folder, read_json, write_json
from memopt.planning.captured import Captured
from memopt.planning.footprint import Footprint
from memopt.planning.make_plan import with_graphs
from memopt.planning.plan import Plan
from memopt.planning.plan_file import as_json, fields_from
from memopt.solver import Offload, Schedule

_MOST = 256
"""The number of files that are kept, the newest ones."""


@dataclass(frozen=True)
class Kept:
    """A plan from the cache."""

    plan: Plan
    """The plan, without graphs."""
    lever_set: int
    """The index of its lever set among the planner's lever sets."""
    footprint: Footprint | None = None
    """The bytes that its compiled graphs hold, where these are found by compiling."""

    def live(self, captured: Callable[[], Captured]) -> Plan:
        """The plan with its graphs, which `captured` captures on first use."""
        return with_graphs(self.plan, captured)

    def as_json(self) -> dict[str, Any]:
        """The values that `from_json` makes an equal plan of."""
        assert self.plan.schedule is not None
        return {
            "lever_set": self.lever_set,
            "plan": as_json(self.plan),
            "schedule": asdict(self.plan.schedule),
            "footprint": None if self.footprint is None else asdict(self.footprint),
        }

    @classmethod
    def from_json(cls, values: Any) -> Kept | None:
        """The plan of `as_json`; None for values that are damaged or of another version."""
        if not isinstance(values, dict):
            return None
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            offloads = tuple(Offload(**fields) for fields in values["schedule"]["offloads"])
            schedule = Schedule(tuple(values["schedule"]["evaluations"]), offloads)
            plan = replace(Plan(**fields_from(values["plan"])), schedule=schedule)
            footprint = values["footprint"]
            return cls(plan, int(values["lever_set"]), None if footprint is None else Footprint(**footprint))
        return None


def is_on() -> bool:
    """Whether jobs have keys, so that plans are read and written: not with `MEMOPT_CACHE=0` in the environment."""
    return os.environ.get("MEMOPT_CACHE", "1") != "0"


def find(key: str | None) -> Kept | None:
    """The plan stored under a key; None where there is none, or where the file cannot be read."""
    return Kept.from_json(read_json(_path(key))) if key is not None else None


def keep(key: str | None, kept: Kept) -> None:
    """Store a plan under a key. Nothing happens where the folder is not writable."""
    if key is None:
        return
    with contextlib.suppress(OSError):
        write_json(_path(key), kept.as_json())
        _drop_the_oldest()


def find_by(sketch: str | None) -> Kept | None:
    """The plan stored under the key that was last noted for a sketch (`Job.sketch`)."""
    key = read_json(_path(sketch)) if sketch is not None else None
    return find(key) if isinstance(key, str) else None


def note(sketch: str | None, key: str | None) -> None:
    """Store the key that a sketch led to."""
    if sketch is not None and key is not None:
        with contextlib.suppress(OSError):
            write_json(_path(sketch), key)


def drop(key: str | None) -> None:
    """Delete a plan that turned out to belong to another step."""
    if key is not None:
        with contextlib.suppress(OSError):
            _path(key).unlink(missing_ok=True)


def _path(key: str) -> Path:
    """The file of a key."""
    return cache_folder() / "plans" / f"{key}.json"


def _drop_the_oldest() -> None:
    """Delete all but the newest `_MOST` files."""
    files = sorted((cache_folder() / "plans").glob("*.json"), key=_age, reverse=True)
    for file in files[_MOST:]:
        file.unlink(missing_ok=True)


def _age(file: Path) -> Any:
    """The time of a file's last change in seconds; 0 where the file is gone."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0
