"""The value that describes a lever: what it does, at what price, and how a plan applies it; and the rewritings among
which a plan is sought, from no lever to all that are allowed."""

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
    """How a lever rewrites the captured step. The search tries it on top of the levers before it."""

    deciders: Deciders | Callable[[Rewriting, Hardware, str], Deciders]
    """The deciders to try, each in place of the one before it. The pipelines that they return have the lever's name as
    label.

    If they depend on the step, this is a function that returns them. It takes the step's rewriting without levers, the
    hardware, and the prefix of the names under which the model keeps histories of scales (see `DecideFp8`).
    """
    place: Literal["before", "with", "after"] = "after"
    """When the deciders run: before those of precision, which then decide the dtypes of what these make; right after
    them ("with"); or last."""
    joint: DecideJoint | None = None
    """Decides the passes on the joint graph, in place of the `joint` of levers before it. A lever that has it is tried
    even if its deciders find nothing to rewrite."""
    faster: Callable[[Hardware], bool] | None = None
    """Whether the lever promises a shorter step on a device. If so, it is tried first, even if the step fits without
    it."""
    needs_low: bool = False
    """Whether the lever works only in a step in 16 bits."""
    exclusive: str = ""
    """An exclusive action: levers with the same text exclude each other. It ends the sentence "allow names … and
    …, which …" of the error; empty for a lever that excludes no other."""


@dataclass(frozen=True)
class OptimizerChange:
    """How a lever wraps the optimizer. The search uses it where no lever on the graph makes the step fit the budget."""

    wrap: Callable[[Any], optim.Optimizer]
    """Returns an optimizer with the lever around the given one, which is also stepped on fakes, to find its price."""
    changes: str
    """The change that it makes, for receipts."""
    exactness: str
    """How far the numbers differ from those of the plain step, for receipts."""
    _: KW_ONLY
    check: Callable[[Any], None] | None = None
    """Raises `ValueError` for an optimizer that the lever does not fit."""
    apply: Callable[[nn.Module, optim.Optimizer], optim.Optimizer] | None = None
    """Called in place of `wrap` where the lever also changes the model's parameters, in place."""
    narrows: bool = False
    """Whether parameters and gradients become bfloat16."""
    offloads: bool = False
    """Whether the optimizer's state is held in the host's memory."""
    in_backward: bool = False
    """Whether parameters are stepped in the backward. Such a lever is put around all other levers."""


@dataclass(frozen=True)
class Lever:
    """One way to make a training step smaller or faster: a change of the graph or of the optimizer, with what users
    read about it."""

    name: str
    """The name by which `allow` takes it."""
    what: str
    """The lever's effect, in one sentence."""
    exactness: Exactness
    price: str
    """The lever's cost in time, memory or exactness."""
    _: KW_ONLY
    default: bool = False
    """Whether it is in the default of `allow`."""
    option: str = "allow"
    """The option of `optimize` by which users choose it."""
    tried_by: str = "the search"
    """The stage that tries the lever, named for users. "the search" adds levers with a `graph` one after the other, and
    those with an `optimizer` where nothing else fits; other levers are decided elsewhere, such as by the solver."""
    graph: GraphChange | None = None
    optimizer: OptimizerChange | None = None

    def __str__(self) -> str:
        return self.name


def lever_sets(
    base: Rewriting, levers: Collection[Lever], card: Hardware, *, histories: str = ""
) -> tuple[Rewriting, ...]:
    """Returns `base`, which has no levers, followed by rewritings that each add one lever that rewrites graphs to those
    before it: first the levers that are faster on `card`, then the others in the order given. A lever with several
    deciders (`GraphChange.deciders`) has one rewriting for each.

    In each rewriting `needed` names the lever added last, which must find something to rewrite; it is empty for a lever
    that also decides passes on the joint graph. `histories` is the prefix of the names of 8-bit layers' scale
    histories. Raises `ValueError` for levers that exclude each other, and for one that needs 16 bits where the step is
    in fp32."""
    changes = [(lever, lever.graph) for lever in levers if lever.graph is not None]
    _check_exclusive(changes)
    quick = [pair for pair in changes if pair[1].faster is not None and pair[1].faster(card)]
    found, used = [base], dict.fromkeys(("before", "with", "after"), tuple[Decide, ...]())
    for lever, change in (*quick, *(pair for pair in changes if pair not in quick)):
        if change.needs_low and base.autocast is None:
            raise ValueError(
                f"{lever.name!r} in allow needs a step in 16 bits, but on {card.name!r} this one is in fp32; give "
                f"precision='bf16', or leave {lever.name!r} out of allow"
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
