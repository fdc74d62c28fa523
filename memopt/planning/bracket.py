"""The largest number that fits a budget, between one that is known to fit and one that is known not to."""

from __future__ import annotations

from dataclasses import dataclass, field

# A number is at most this many times as far from where the search began as the largest one known to fit.
_GROWTH = 8


@dataclass
class Bracket:
    """A search over the numbers 1 to `most`, of which those up to the wanted one fit `budget_bytes`.

    To try few numbers, the next one is where a straight line through two known needs meets the budget; once a number is
    known not to fit, every other one halves what is left.
    """

    budget_bytes: int
    most: int
    first: tuple[int, ...]
    """The numbers that are tried first, as long as they lie between what fits and what does not."""
    fits: int = 0
    """The largest number known to fit."""
    refused: int = field(init=False)
    """The smallest number known not to fit; `most` + 1 where none is known."""
    needs: dict[int, int] = field(default_factory=dict)
    """The smallest budget in bytes of each number that was tried, or estimated before the search."""
    _lines_fail: bool = field(default=False, init=False)
    """Whether a number was refused although the budget has room for it, which the needs cannot predict."""

    def __post_init__(self) -> None:
        self.refused = self.most + 1

    @property
    def is_closed(self) -> bool:
        """Whether a number is known not to fit."""
        return self.refused <= self.most

    def note(self, number: int, needed_bytes: int, *, fits: bool) -> None:
        """Record what a number needs, and whether it fits."""
        self.needs[number] = needed_bytes
        self._lines_fail |= not fits and needed_bytes <= self.budget_bytes
        if fits:
            self.fits = number
        else:
            self.refused = number

    def next(self) -> int | None:
        """The number to try next, above `fits` and below `refused`; None where the search is over."""
        if self.refused - self.fits <= 1:
            return None
        for number in self.first:
            if self.fits < number < self.refused:
                return number
        start = self.first[0]
        if not self.fits:  # twice as far below where the search began
            return max(1, self.refused - max(start - self.refused, 1))
        # Limited growth: inputs of a size may take memory, and a line through small numbers may be too flat.
        farther = max(self.fits - start, 1)
        most = min(self.refused - 1, self.fits + _GROWTH * farther)
        if self.is_closed and (self._lines_fail or len(self.needs) % 2):
            return (self.fits + self.refused) // 2  # bisection, where lines predict badly
        if len(self.needs) < 2:
            return most
        low, high = (self.fits, self.refused) if self.is_closed else self._nearest()
        slope = (self.needs[high] - self.needs[low]) / (high - low)
        guess = low + int((self.budget_bytes - self.needs[low]) / slope) if slope > 0 else self.fits
        if guess <= self.fits:  # where the needs predict too much, or nothing: twice as far from the start
            guess = most if not slope else self.fits + (1 if self.is_closed else farther)
        return min(guess, most)

    def _nearest(self) -> tuple[int, int]:
        """The two known numbers whose needs lie nearest to the budget, the smaller number first."""
        one, other = sorted(self.needs, key=lambda number: abs(self.needs[number] - self.budget_bytes))[:2]
        return min(one, other), max(one, other)
