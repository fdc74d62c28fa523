from __future__ import annotations

import pytest

from memopt.errors import GIB
from memopt.units import duration, size

MB = 1024**2


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "–"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 kB"),
        (1536, "1.5 kB"),
        (205 * MB, "205 MB"),
        (999 * 1024, "999 kB"),
        (1000 * 1024 - 1, "0.977 MB"),
        (1000 * 1024, "0.977 MB"),
        (MB - 1, "1 MB"),
        (GIB - 1, "1 GB"),
        (-1000 * MB, "-0.977 GB"),
        (int(1.37 * GIB), "1.37 GB"),
        (80 * GIB, "80 GB"),
        (2048 * GIB, "2,048 GB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "–"), (1.234e-6, "0.00123 ms"), (0.0042, "4.2 ms"), (0.25, "250 ms"), (12.3456, "12.3 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
