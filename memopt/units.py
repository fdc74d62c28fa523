"""Numbers of bytes and of seconds as text, and in other units."""

from __future__ import annotations

from memopt.errors import GIB


def size(nbytes: int) -> str:
    """Bytes with three digits, in units of powers of 1024: "1.37 GB", "205 MB", "-12 kB"; "–" for 0. Values that would
    have four digits are given in the next unit: "0.977 GB"."""
    if nbytes < 0:
        return f"-{size(-nbytes)}"
    for unit, scale in (("GB", GIB), ("MB", 1024**2), ("kB", 1024)):
        if nbytes >= 999.5 * scale / 1024 and nbytes >= 1024:
            return f"{_three_digits(nbytes / scale)} {unit}"
    return f"{nbytes} B" if nbytes else "–"


def duration(seconds: float) -> str:
    """Seconds with three digits: "1.05 s", "23.3 ms"; "–" for 0."""
    if seconds >= 1:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3)} ms" if seconds else "–"


def micros(seconds: float) -> float:
    """Seconds as microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)


def _three_digits(value: float) -> str:
    """The value with three significant digits; a larger one keeps all digits before the point, as in "1,234"."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
