"""Values in files are taken as data: of exactly the types that are expected, and under their digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from memopt.disk_cache import LIVE, as_json, opened, sealed, value_from


@dataclass(frozen=True)
class Inner:
    size: int
    name: str = ""


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rows: tuple[tuple[str, int], ...]
    many: tuple[Inner, ...] = ()
    rate: float = 1.0
    on: bool = False
    kind: Literal["a", "b"] = "a"
    maybe: Inner | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    live: object = field(default=None, compare=False, metadata=LIVE)


WHOLE = Outer(Inner(3, "x"), (("y", -4),), (Inner(1), Inner(2)), 0.25, True, "b", Inner(9), {"z": 2.5}, live=object())


def test_what_is_written_is_read_again() -> None:
    values = json.loads(json.dumps(as_json(WHOLE)))
    assert "live" not in values
    assert value_from(Outer, values) == WHOLE
    assert value_from(Outer, {"inner": {"size": 1}, "rows": []}) == Outer(Inner(1), ())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"inner": None}, r"Outer\.inner must be Inner"),
        ({"inner": {}}, r"Outer\.inner\.size is missing"),
        ({"inner": {"size": True}}, r"Outer\.inner\.size must be int, not 'True'"),
        ({"inner": {"size": 1.0}}, r"Outer\.inner\.size must be int"),
        ({"inner": {"size": 10**400}}, r"Outer\.inner\.size must be int"),
        ({"inner": {"size": 1, "more": 2}}, r"Outer\.inner has no field 'more'"),
        ({"inner": {"size": 1, "name": "\ud800"}}, r"Outer\.inner\.name must be str"),
        ({"rows": [["y", 1, 2]]}, r"Outer\.rows\[0\] must have 2 items, not 3"),
        ({"rows": {}}, r"Outer\.rows must be tuple"),
        ({"many": [{"size": 1}, 2]}, r"Outer\.many\[1\] must be Inner"),
        ({"rate": float("nan")}, r"Outer\.rate must be float"),
        ({"rate": float("inf")}, r"Outer\.rate must be float"),
        ({"on": 1}, r"Outer\.on must be bool"),
        ({"kind": "c"}, r"Outer\.kind must be .*Literal"),
        ({"kind": []}, r"Outer\.kind must be .*Literal"),
        ({"rates": {"z": "2"}}, r"Outer\.rates\['z'\] must be float"),
        ({"live": 1}, r"Outer has no field 'live'"),
    ],
)
def test_other_types_are_refused_with_their_place(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        value_from(Outer, {**as_json(WHOLE), **change})


def test_a_changed_value_does_not_match_the_digest() -> None:
    values = sealed({"a": 1, "b": [1.5, "x"]})
    assert opened(json.loads(json.dumps(values))) == {"a": 1, "b": [1.5, "x"]}
    for wrong in (None, [], {}, {**values, "a": 2}, {**values, "c": 0}, {"a": 1}, {**values, "digest": None}):
        with pytest.raises(ValueError, match=r"a JSON object is expected|match their digest"):
            opened(wrong)
