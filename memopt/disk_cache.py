"""The cache folder on disk; files that several processes may read and write at once; and values as JSON: frozen
dataclasses that are written with a digest of the whole, and checked when they are read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PART = ".part"
_PART_SECONDS = 600
"""The age in seconds from which a temporary file counts as left behind by a process that was killed."""


def cache_folder() -> Path:
    """The folder `MEMOPT_CACHE_DIR` if that is set, else `memopt` in `XDG_CACHE_HOME` or in `~/.cache`; it need not
    exist. Raises `OSError` where no folder is named and the user has no home."""
    named = os.environ.get("MEMOPT_CACHE_DIR")
    try:
        if named:
            return Path(named).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path("~/.cache").expanduser()) / "memopt"
    except RuntimeError as error:  # pathlib's, for a user without a home
        raise OSError(str(error)) from None


def read_json(path: Path) -> Any | None:
    """The JSON value in the file, or None if there is no such file or it cannot be read as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as `write_text` does, in a folder that is made if it does not exist, and deletes temporary files
    that killed processes have left there. Raises `OSError` as that does, and `TypeError` if `value` is not JSON."""
    text = json.dumps(value, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    for part in path.parent.glob(f"*{_PART}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _PART_SECONDS:
                part.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically: a reader sees the old file or the new one, also after the process is killed
    or the machine stops. Raises `OSError` if it cannot be written; the old file is then unchanged."""
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device or a pipe, which cannot be replaced
        return
    # The temporary file is in the same folder because a rename is atomic only within one file system.
    temporary = path.with_name(f"{path.name[:200]}.{secrets.token_hex(8)}{_PART}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@lru_cache(maxsize=64)
def warn_not_kept(what: str, reason: str) -> None:
    """Warns that `what` could not be stored on disk, for `reason`; once per process for each reason."""
    warnings.warn(
        f"{what} are not stored on disk ({reason}); set MEMOPT_CACHE_DIR to a folder that can be written to",
        stacklevel=3,
    )


LIVE: Mapping[str, bool] = MappingProxyType({"live": True})
"""Metadata for a field of a dataclass that exists only in the process that made the value, and is not saved."""
DIGEST = "digest"
_LARGEST = int(sys.float_info.max)

ValueT = TypeVar("ValueT")


def as_json(value: DataclassInstance) -> dict[str, Any]:
    """The fields of a frozen dataclass as values for JSON, without those whose metadata is `LIVE`."""
    return {field.name: _plain(getattr(value, field.name)) for field in _saved(type(value))}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return as_json(value) if is_dataclass(value) and not isinstance(value, type) else value


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values and, under the key `DIGEST`, a hash of them, by which `opened` detects that a file was changed."""
    return {**values, DIGEST: _digest(values)}


def opened(values: Any) -> dict[str, Any]:
    """The values that were given to `sealed`. Raises `ValueError` if the digest is missing or does not match them."""
    if not isinstance(values, dict):
        raise ValueError(f"a JSON object is expected, not {type(values).__name__}")
    own = {name: value for name, value in values.items() if name != DIGEST}
    if values.get(DIGEST) != _digest(own):
        raise ValueError("the contents do not match their digest: the file was changed after it was written")
    return own


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def value_from(kind: type[ValueT], value: Any) -> ValueT:
    """`value`, read from JSON, as a value of the type `kind`: a dataclass, number, boolean, text or literal, a tuple or
    mapping of these, or None where that is allowed. Types are checked strictly: True is no number, and numbers must be
    finite. Fields with a default may be missing. Raises `ValueError`, with the path within `value`."""
    result: ValueT = _read(kind, value, kind.__name__)
    return result


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, place)
    if origin is tuple:
        return _tuple(inner, value, place)
    if NoneType in inner:
        (only,) = (one for one in inner if one is not NoneType)
        return None if value is None else _read(only, value, place)
    if origin is Literal:
        fits = isinstance(value, str) and value in inner
    elif origin is not None and issubclass(origin, Mapping):
        _check(isinstance(value, dict), kind, value, place)
        return {name: _read(inner[1], item, f"{place}[{name!r}]") for name, item in value.items()}
    elif kind in (int, float):
        whole = type(value) is int and abs(value) <= _LARGEST
        fits = whole or (kind is float and type(value) is float and abs(value) <= _LARGEST)
    else:
        fits = type(value) is kind and (kind is not str or not any("\ud800" <= letter <= "\udfff" for letter in value))
    _check(fits, kind, value, place)
    return value


def _check(fits: bool, kind: Any, value: Any, place: str) -> None:
    if not fits:
        raise ValueError(f"{place} must be {getattr(kind, '__name__', kind)}, not {str(value)[:40]!r}")


def _dataclass(kind: type[DataclassInstance], value: Any, place: str) -> Any:
    _check(isinstance(value, dict), kind, value, place)
    kinds = _types(kind)
    known = {field.name: field for field in _saved(kind)}
    if unknown := sorted(map(str, value.keys() - known.keys())):
        raise ValueError(f"{place} has no field {unknown[0][:40]!r}")
    required = (name for name, field in known.items() if field.default is field.default_factory is MISSING)
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{place}.{missing[0]} is missing")
    return kind(**{name: _read(kinds[name], item, f"{place}.{name}") for name, item in value.items()})


def _tuple(inner: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    _check(isinstance(value, list), tuple, value, place)
    kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
    if len(kinds) != len(value):
        raise ValueError(f"{place} must have {len(inner)} items, not {len(value)}")
    return tuple(_read(kind, item, f"{place}[{at}]") for at, (kind, item) in enumerate(zip(kinds, value, strict=True)))


_types = lru_cache(maxsize=64)(get_type_hints)


def _saved(kind: type[DataclassInstance]) -> list[Field[Any]]:
    """The fields of a dataclass that are saved: those that are not `LIVE`."""
    return [field for field in fields(kind) if not field.metadata.get("live")]
