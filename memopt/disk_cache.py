"""Where memopt keeps what it need not find out again, and how files there are read and written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """`MEMOPT_CACHE_DIR` where it is set, else `memopt` in `XDG_CACHE_HOME` or `~/.cache`; `write_json` makes it."""
    named = os.environ.get("MEMOPT_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "memopt"


def read_json(path: Path) -> Any | None:
    """What `path` holds, or None where there is no such file, or none that can be read as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path`, at once: readers see the old file or the new one, never a part, whoever else writes.

    Raises OSError where the folder cannot be written, TypeError where `value` is no JSON; the old file then stays.
    """
    text = json.dumps(value, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic within one file system only.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
