"""One change of a plan to one operator, as data: planning fills it in, `diff_text` shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPE, CAST, FUSED, CHUNKED, REWRITTEN, REMOVED = "dtype", "cast", "fused", "chunked", "rewritten", "removed"
SAVED, RECOMPUTED, OFFLOADED, FREED, IN_PLACE, MOVED = (
    "saved as",
    "recomputed",
    "offloaded",
    "freed early",
    "in place",
    "moved",
)
KEPT = "kept gathered"
KINDS = (DTYPE, CAST, FUSED, CHUNKED, REWRITTEN, REMOVED, SAVED, RECOMPUTED, OFFLOADED, FREED, IN_PLACE, KEPT, MOVED)
"""The kinds of changes in the order in which a module's are shown."""


@dataclass(frozen=True)
class Change:
    """A change of one kind (one of `KINDS`) to one operator."""

    kind: str
    op: str
    """Name of the node: in the operator graph for changes that passes made there, else in the captured joint graph."""
    module: str
    """Path of the module that called the operator, or whose call it differentiates; "" outside of submodules."""
    operator: str
    """The operator's name without namespace and overload: "addmm"."""
    number: int = 0
    """Position among the calls of the same operator by the same line in the same module, for comparing blocks."""
    detail: str = ""
    """Part of the change's meaning: the dtypes, or the operators that it replaces."""
    reason: str = ""
    readers: tuple[str, ...] = ()
    """Operators in whose backward a recomputed or fetched value is first read."""
    nbytes: int = 0
    """Bytes that are recomputed, copied to the host, or saved in fewer bits."""
    seconds: float = 0.0
    """Seconds of all recomputations of the operator, by the time model."""
    times: int = 0
    """How often the operator runs beyond the first time, or how often its value is offloaded."""
    source: str = ""
    """The line of the user's code that called the operator, as "file:line"; "" where none is known."""
    code: str = ""
    """The text of that line."""
    region: int = 0
    """Number of the captured region."""
    sign: str = ""
    """Between two plans: "+" for a change that only the later makes, "-" for one that only the earlier makes."""

    @property
    def meaning(self) -> tuple[object, ...]:
        """Equal for the same change of the same operator in two plans."""
        return self.kind, self.module, self.operator, self.code, self.number, self.detail, self.times, self.region


def between(earlier: tuple[Change, ...], later: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes that only one of two plans makes, with their `sign`."""
    old, new = ({change.meaning for change in changes} for changes in (earlier, later))
    gone = (replace(change, sign="-") for change in earlier if change.meaning not in new)
    come = (replace(change, sign="+") for change in later if change.meaning not in old)
    return (*gone, *come)
