"""Plans and frontiers in files that the user names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from memopt.disk_cache import write_text
from memopt.errors import PlanFileError
from memopt.saved_values import DIGEST, as_json, opened, sealed, value_from

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 1
ValueT = TypeVar("ValueT")


def save(path: str | Path, value: DataclassInstance) -> None:
    """Write a plan or a frontier as JSON, atomically. Raises `OSError`."""
    write_text(Path(path), json.dumps(sealed({"format": FORMAT, **as_json(value)}), indent=1))


def load(path: str | Path, kind: type[ValueT], called: str, mend: str) -> ValueT:
    """The value of type `kind`, `called` so in messages, that `save` wrote.

    Raises `PlanFileError` with the path, the reason and the mend for any other file, and `OSError` where it cannot be
    read.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("it is of another format")
        values = opened(values) if DIGEST in values else values  # files of earlier versions have none
        del values["format"]
        return value_from(kind, values)
    except (ValueError, RecursionError) as error:
        text = str(error) or "it is nested too deeply"
        raise PlanFileError(f"{path} is not a memopt {called} of format {FORMAT}; {mend} ({text[:200]})") from error
