"""What memopt found when it last searched a device for tensors that do not belong to a model's steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from memopt.account.elsewhere import Elsewhere


@dataclass
class LatestLooks:
    """What was found in the latest searches of the device for tensors outside of the step, at moments of one
    `Moment.kind`: all before a forward or all before a backward, with equally many forwards waiting."""

    found: Elsewhere
    """What the latest search found."""
    levels: deque[tuple[int, int]]
    """For each search: the bytes allocated less those that memopt accounts for (`Moment.known_bytes`), and how many of
    these the search did not find elsewhere."""

    highest: int
    """The most bytes allocated, less those that memopt accounts for, at any search of this kind since a plan was
    made."""

    @property
    def level(self) -> int:
        """The bytes that were allocated when the device was last searched for tensors outside of the step, less those
        that memopt accounts for (`Moment.known_bytes`)."""
        return self.levels[-1][0]

    @property
    def lowest(self) -> int:
        """The smallest number of bytes allocated at any of the latest searches, less those that memopt accounts for."""
        return min([level for level, _ in self.levels])

    @property
    def most(self) -> int:
        """The most bytes that any of the latest searches found elsewhere."""
        return max([level - rest for level, rest in self.levels])

    def limit(self, level: int) -> int:
        """An upper bound on what a search would find outside of the step now, when `level` bytes are allocated besides
        those that memopt accounts for. Some of these belong to the step: the fewest that did at any of the latest
        searches are subtracted."""
        return max(0, level - min([rest for _, rest in self.levels]))
