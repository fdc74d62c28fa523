"""A plan as JSON values and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memopt.account.account import Account
from memopt.account.breakdown import Breakdown
from memopt.planning.module_rows import ModuleRow
from memopt.planning.options import DEFAULT_EFFORT, Effort
from memopt.planning.receipt import ReceiptRow
from memopt.planning.region_schedule import RegionSchedule
from passes import HostStay

if TYPE_CHECKING:
    from memopt.planning.plan import Plan

_LIVE = ("origin", "schedule")


def as_json(plan: Plan) -> dict[str, Any]:
    """All fields but the live ones, as JSON has them."""
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__ if name not in _LIVE}
    for name in ("account", "plain", "planned", "effort"):
        values[name] = asdict(values[name])
    for name in ("regions", "modules", "receipt"):
        values[name] = [asdict(value) for value in values[name]]
    return values


def fields_from(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Plan` out of what `as_json` gave. Raises `KeyError`, `TypeError` for other values."""

    def breakdown(row: dict[str, Any]) -> Breakdown:
        return Breakdown(row["peak_bytes"], row["at"], tuple((name, size) for name, size in row["rows"]))

    def region(row: dict[str, Any]) -> RegionSchedule:
        stays = tuple(HostStay(**stay) for stay in row.get("stays", ()))
        steps = tuple(row.get("steps", ()))
        return RegionSchedule(row["fingerprint"], tuple(row["evaluations"]), row["boundary"], stays, steps)

    return {
        **values,
        "account": Account(**values["account"]),
        "plain": breakdown(values["plain"]),
        "planned": breakdown(values["planned"]),
        "effort": Effort(**values["effort"]) if "effort" in values else DEFAULT_EFFORT,
        "regions": tuple(map(region, values["regions"])),
        "modules": tuple(ModuleRow(**row) for row in values["modules"]),
        "notes": tuple(values["notes"]),
        "levers": tuple(values.get("levers", ())),
        "proposals": tuple(values.get("proposals", ())),
        "receipt": tuple(ReceiptRow(**row) for row in values.get("receipt", ())),
    }
