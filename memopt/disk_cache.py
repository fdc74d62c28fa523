"""The cache folder on disk, and JSON files in it that several processes may read and write at once."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """The folder `MEMOPT_CACHE_DIR` if that is set, else `memopt` in `XDG_CACHE_HOME` or in `~/.cache`.

    It need not exist: `write_json` creates it.
    """
    named = os.environ.get("MEMOPT_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "memopt"


def read_json(path: Path) -> Any | None:
    """The JSON value in the file, or None if there is no such file or it cannot be read as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` atomically: a reader sees the old file or the new one, never a part of it.

    Raises `OSError` if the folder cannot be written to and `TypeError` if `value` is not JSON; the old file is then
    unchanged.
    """
    text = json.dumps(value, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file is in the same folder because a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
