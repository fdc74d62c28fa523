"""Plans on disk: the second start of the same job plans nothing."""

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
"""How many files are kept: the newest."""


@dataclass(frozen=True)
class Kept:
    """A plan that was made before."""

    plan: Plan
    """Without graphs."""
    rung: int
    """Which rung of the ladder it is on."""
    footprint: Footprint | None = None
    """What its graphs hold once they are lowered, where that is found by lowering them."""

    def live(self, captured: Callable[[], Captured]) -> Plan:
        """The plan with the graphs that it is for, which are captured when somebody looks at them."""
        return with_graphs(self.plan, captured)


def is_on() -> bool:
    """Whether jobs have keys, so that plans are looked up and kept: not with `MEMOPT_CACHE=0` in the environment."""
    return os.environ.get("MEMOPT_CACHE", "1") != "0"


def find(key: str | None) -> Kept | None:
    """What was kept under a key; None for nothing, or nothing that can be read."""
    values = read_json(_path(key)) if key is not None else None
    if not isinstance(values, dict):
        return None
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # damaged, or of another version
        offloads = tuple(Offload(**each) for each in values["schedule"]["offloads"])
        schedule = Schedule(tuple(values["schedule"]["evaluations"]), offloads)
        plan = replace(Plan(**fields_from(values["plan"])), schedule=schedule)
        lowered = values["footprint"]
        return Kept(plan, int(values["rung"]), None if lowered is None else Footprint(**lowered))
    return None


def keep(key: str | None, kept: Kept) -> None:
    """Keep a plan under a key. A folder that cannot be written to keeps nothing."""
    if key is None:
        return
    assert kept.plan.schedule is not None
    values = {
        "rung": kept.rung,
        "plan": as_json(kept.plan),
        "schedule": asdict(kept.plan.schedule),
        "footprint": None if kept.footprint is None else asdict(kept.footprint),
    }
    with contextlib.suppress(OSError):
        write_json(_path(key), values)
        _drop_the_oldest()


def find_by(sketch: str | None) -> Kept | None:
    """What was kept under the key that a sketch led to last time."""
    key = read_json(_path(sketch)) if sketch is not None else None
    return find(key) if isinstance(key, str) else None


def note(sketch: str | None, key: str | None) -> None:
    """Remember which key a sketch leads to."""
    if sketch is not None and key is not None:
        with contextlib.suppress(OSError):
            write_json(_path(sketch), key)


def drop(key: str | None) -> None:
    """Forget a plan that turned out to be another step's."""
    if key is not None:
        with contextlib.suppress(OSError):
            _path(key).unlink(missing_ok=True)


def _path(key: str) -> Path:
    return cache_folder() / "plans" / f"{key}.json"


def _drop_the_oldest() -> None:
    files = sorted((cache_folder() / "plans").glob("*.json"), key=_age, reverse=True)
    for file in files[_MOST:]:
        file.unlink(missing_ok=True)


def _age(file: Path) -> Any:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0
