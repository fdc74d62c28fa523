"""What a lever is: one value that says what it does, at what price, and how a plan applies it. And the rewritings that
a plan is sought with, from no lever to all that are allowed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import nn, optim

from memopt.capture.operators import Decide, DecideJoint, Rewriting
from memopt.device import Hardware

Exactness: TypeAlias = Literal["bitwise", "rounding", "approximate"]
"""How losses and gradients compare with those of the plain model: equal to the last bit; equal but for rounding; or
close, where training itself changes."""

Deciders: TypeAlias = tuple[Decide, ...]


@dataclass(frozen=True)
class GraphChange:
    """The passes of a lever that rewrites the captured step: it is tried on top of the levers before it."""

    deciders: Deciders | Callable[[Rewriting, Hardware, str], Deciders]
    """The deciders to try, each in place of the one before it. Their pipelines have the lever's name as label. Where
    they depend on the step: a function of its rewriting without levers, of the hardware, and of the prefix of the names
    of the model's scale histories (see `DecideFp8`)."""
    place: Literal["before", "with", "after"] = "after"
    """Where they run: before precision, which then decides the dtypes of what they make, next to it, or after it."""
    joint: DecideJoint | None = None
    """Decides passes on the joint graph instead, whatever the deciders find."""
    faster: Callable[[Hardware], bool] | None = None
    """Whether the lever promises a shorter step on a device: it is then tried first of all, whether or not the step
    fits without it."""
    needs_low: bool = False
    """Whether the step must be in 16 bits."""
    exclusive: str = ""
    """What it does that two levers with the same text cannot both do, as the end of "which …"."""


@dataclass(frozen=True)
class OptimizerChange:
    """The wrapper that a lever puts around the optimizer. Such a lever is used where no lever on the graph makes the
    step fit the budget."""

    wrap: Callable[[Any], optim.Optimizer]
    """The optimizer with the lever around it; stepped on fake tensors too, for its price."""
    changes: str
    """The change that it makes, for receipts."""
    exactness: str
    """How far the numbers differ from those of the plain step, for receipts."""
    _: KW_ONLY
    check: Callable[[Any], None] | None = None
    """Raises `ValueError` for an optimizer that it does not fit."""
    apply: Callable[[nn.Module, optim.Optimizer], optim.Optimizer] | None = None
    """Does as `wrap`, and changes the model's parameters, in place."""
    narrows: bool = False
    """Whether parameters and gradients become bfloat16."""
    offloads: bool = False
    """Whether the optimiser's state is held in the host's memory."""
    in_backward: bool = False
    """Whether parameters are stepped in the backward. Such a lever is put around all others."""


@dataclass(frozen=True)
class Lever:
    """One way to make a training step smaller or faster."""

    name: str
    """As `allow` takes it."""
    what: str
    """The lever's effect, in one sentence."""
    exactness: Exactness
    price: str
    """The lever's cost in time, memory or exactness."""
    _: KW_ONLY
    default: bool = False
    """Whether `allow` holds it unless told otherwise."""
    option: str = "allow"
    """The option of `optimize` that names it."""
    tried_by: str = "the search"
    """What tries it: the search, which adds levers with `graph` one after the other, and those with `optimizer` where
    nothing else fits; or what knows better whether it helps."""
    graph: GraphChange | None = None
    optimizer: OptimizerChange | None = None

    def __str__(self) -> str:
        return self.name


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
