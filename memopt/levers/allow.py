"""The option `allow`: its check, and what is said about it."""

from __future__ import annotations

from collections.abc import Collection

from memopt.levers.all import DEFAULT_LEVERS, LEVERS, levers_named
from memopt.levers.lever import Lever
from memopt.levers.recompute import RECOMPUTE, RECOMPUTE_LEFT_OUT


def check_allow(allow: Collection[str | Lever]) -> tuple[Lever, ...]:
    """The levers in `allow` in the order in which they are tried: those of `LEVERS`, given by name or as they are, and
    then the user's own by name. Raises `TypeError`, and `ValueError` for a name that is not in `LEVERS`."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise TypeError(f"allow must be a set of lever names, such as memopt.DEFAULT_LEVERS | {{'fp8'}}, not {allow!r}")
    own: list[Lever] = []
    for lever in allow:
        if isinstance(lever, Lever):
            if LEVERS.get(lever.name, lever) != lever or any(other.name == lever.name for other in own):
                raise ValueError(f"allow has two levers of the name {lever.name!r}; give yours another one")
            own.extend([lever] if lever.name not in LEVERS else [])
        elif lever not in LEVERS:
            raise ValueError(f"allow names an unknown lever {lever!r}; known are {', '.join(sorted(LEVERS))}")
    return (*levers_named(set(map(str, allow))), *sorted(own, key=lambda lever: lever.name))


def recompute_note(allow: Collection[str]) -> tuple[str, ...]:
    """A sentence for plans and refusals where `allow` leaves recomputation out; else nothing."""
    if RECOMPUTE.name in allow:
        return ()
    return (f"{RECOMPUTE_LEFT_OUT}; to keep the default levers, give {allow_with(allow)}",)


def allow_with(names: Collection[str]) -> str:
    """The argument that adds levers to the default ones, as users write it."""
    added = ", ".join(map(repr, sorted(set(names) - DEFAULT_LEVERS)))
    return f"allow=memopt.DEFAULT_LEVERS | {{{added}}}" if added else "allow=memopt.DEFAULT_LEVERS"
