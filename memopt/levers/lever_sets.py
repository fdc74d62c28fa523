"""The rewritings that a plan is sought with, from no lever to all that are allowed, in the order in which they are
tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from memopt.capture.operators import Decide, Rewriting
from memopt.device import Hardware
from memopt.levers.lever import GraphChange, Lever


def lever_sets(
    base: Rewriting, levers: Collection[Lever], card: Hardware, *, histories: str = ""
) -> tuple[Rewriting, ...]:
    """Returns `base` without levers, followed by rewritings that each add one lever that rewrites graphs to those
    before it: first those that are faster on `card`, then the others in the order given.

    The field `needed` of each says that its newest lever must find something to rewrite. Raises ValueError for levers
    that exclude each other, and for one that needs a step in 16 bits where this is in fp32. `histories`: see
    `GraphChange`.
    """
    changes = [(lever, lever.graph) for lever in levers if lever.graph is not None]
    _check_exclusive(changes)
    quick = [pair for pair in changes if pair[1].faster is not None and pair[1].faster(card)]
    found, used = [base], dict.fromkeys(("before", "with", "after"), tuple[Decide, ...]())
    for lever, change in (*quick, *(pair for pair in changes if pair not in quick)):
        if change.needs_low and base.autocast is None:
            raise ValueError(
                f"{lever.name!r} in allow needs a step in 16 bits, which this one is not on {card.name!r}; give "
                "precision='bf16', or leave it out"
            )
        if (lever, change) in quick:
            found[-1] = replace(found[-1], next_is_faster=True)
        names, taken = (*found[-1].levers, lever.name), used[change.place]
        deciders = change.deciders(base, card, histories) if callable(change.deciders) else change.deciders
        for decide in deciders:
            used[change.place] = (*taken, decide)
            found.append(
                replace(
                    base,
                    levers=names,
                    deciders=(*used["before"], *base.deciders, *used["with"], *used["after"]),
                    joint=change.joint or found[-1].joint,
                    needed="" if change.joint else lever.name,
                )
            )
    return tuple(found)


def _check_exclusive(changes: Sequence[tuple[Lever, GraphChange]]) -> None:
    for text in {change.exclusive: None for _, change in changes if change.exclusive}:
        named = [repr(lever.name) for lever, change in changes if change.exclusive == text]
        if len(named) > 1:
            raise ValueError(f"allow names {' and '.join(named)}, which {text}; name one of them")
