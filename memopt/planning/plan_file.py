"""Plans and frontiers as JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memopt.account.account import Account
from memopt.account.breakdown import Breakdown
from memopt.planning.options import DEFAULT_EFFORT, Effort
from memopt.planning.region_schedule import RegionSchedule
from memopt.show.rows import ModuleRow, ReceiptRow
from passes import HostStay

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LIVE: Mapping[str, bool] = MappingProxyType({"live": True})
"""Metadata of a field that is only there in the process that made the value, and is not saved."""


def as_json(value: DataclassInstance) -> dict[str, Any]:
    """The fields of a frozen value that are not `LIVE`, as JSON has them."""
    saved = (field.name for field in fields(value) if not field.metadata.get("live"))
    return {name: _plain(getattr(value, name)) for name in saved}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def fields_from(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Plan` from what `as_json` gave. Raises `KeyError`, `TypeError` for other values."""

    def breakdown(row: dict[str, Any]) -> Breakdown:
        return Breakdown(row["peak_bytes"], row["at"], tuple((name, size) for name, size in row["rows"]))

    def region(row: dict[str, Any]) -> RegionSchedule:
        offloads = tuple(HostStay(**offload) for offload in row.get("offloads", row.get("stays", ())))
        steps = tuple(row.get("steps", ()))
        return RegionSchedule(row["fingerprint"], tuple(row["evaluations"]), row["boundary"], offloads, steps)

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
