"""The cache folder on disk, and files that several processes may read and write at once."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

_PART = ".part"
_PART_SECONDS = 600
"""The age in seconds from which a temporary file is taken for what a killed process left behind."""


def cache_folder() -> Path:
    """The folder `MEMOPT_CACHE_DIR` if that is set, else `memopt` in `XDG_CACHE_HOME` or in `~/.cache`.

    It need not exist: `write_json` creates it. Raises `OSError` where no folder is named and the user has no home.
    """
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
    """Writes `value` to `path` as `write_text` does, in a folder that is made if it is not there, and deletes what
    killed processes left in the folder.

    Raises `OSError` if the folder cannot be written to and `TypeError` if `value` is not JSON; the old file is then
    unchanged.
    """
    text = json.dumps(value, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    for part in path.parent.glob(f"*{_PART}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _PART_SECONDS:
                part.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically: a reader sees the old file or the new one, never a part of it, also after
    the process is killed or the machine stops.

    Raises `OSError` if the folder cannot be written to or the disk is full; the old file is then unchanged.
    """
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
    """Warns that `what` is not kept on disk: once in a process for the same reason."""
    warnings.warn(
        f"{what} are not kept on disk ({reason}); name a folder that can be written to in MEMOPT_CACHE_DIR",
        stacklevel=3,
    )
