"""The names of rich that memopt uses. Importing rich draws from the generator of Python's `random`, which a script may
have seeded, so it is imported here only, and the generator is set back."""

from __future__ import annotations

import random

_before = random.getstate()

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult  # noqa: E402
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Column, Table  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_before)

__all__ = [
    "Column", "Console", "ConsoleOptions", "Progress", "RenderResult", "RenderableType", "SpinnerColumn", "Table",
    "TaskID", "Text", "TextColumn", "TimeElapsedColumn",
]  # fmt: skip
