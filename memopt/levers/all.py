"""All levers of memopt, and the check of the option `allow`, which names the levers that a plan may use. The search for
a plan tries them in the order of `LEVERS`, after those that make the step faster on its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from memopt.levers.chunked_loss import CHUNKED_LOSS
from memopt.levers.decided_elsewhere import (
    EXPANDABLE_SEGMENTS,
    MICROBATCH,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_PARAMETERS,
    PLAIN,
    RECOMPUTE,
    RECOMPUTE_LEFT_OUT,
    REINPLACE,
)
from memopt.levers.fp8 import FP8, FP8_ACTIVATIONS, FP8_BLOCK, FP8_DELAYED, MXFP8
from memopt.levers.fused_ops import FUSED_ATTENTION, FUSED_OPS
from memopt.levers.lever import Lever
from memopt.levers.optimizer_levers import BF16_PARAMETERS, LOW_BIT_OPTIMIZER, OFFLOAD_OPTIMIZER, OPTIMIZER_IN_BACKWARD
from memopt.levers.precision import PRECISION
from memopt.levers.tiles import TILES

_IN_ORDER = (
    PRECISION,
    RECOMPUTE,
    REINPLACE,
    FUSED_OPS,
    FUSED_ATTENTION,
    CHUNKED_LOSS,
    TILES,
    MICROBATCH,
    EXPANDABLE_SEGMENTS,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_PARAMETERS,
    FP8,
    FP8_DELAYED,
    FP8_BLOCK,
    MXFP8,
    FP8_ACTIVATIONS,
    BF16_PARAMETERS,
    LOW_BIT_OPTIMIZER,
    OFFLOAD_OPTIMIZER,
    OPTIMIZER_IN_BACKWARD,
    PLAIN,
)
LEVERS: Mapping[str, Lever] = MappingProxyType({lever.name: lever for lever in _IN_ORDER})
"""All levers by name, in the order that the docstring of this module describes."""
LeverName: TypeAlias = Literal[
    "recompute", "reinplace", "fused_ops", "fused_attention", "chunked_loss", "tiles", "microbatch",
    "expandable_segments", "offload_activations", "offload_parameters", "fp8", "fp8_delayed", "fp8_block", "mxfp8",
    "fp8_activations",
    "bf16_parameters", "low_bit_optimizer", "offload_optimizer", "optimizer_in_backward", "plain",
]  # fmt: skip
"""The names that the option `allow` takes, for type checkers."""

if TYPE_CHECKING:

    class _LeverNames(frozenset[LeverName | Lever]):
        """For type checkers, a set of lever names whose union with others is one too, not a set of `str`."""

        def __or__(self, other: AbstractSet[LeverName | Lever]) -> _LeverNames: ...  # type: ignore[override]


DEFAULT_LEVERS = cast("_LeverNames", frozenset(name for name, lever in LEVERS.items() if lever.default))
OPTIMIZER_LEVERS = frozenset(name for name, lever in LEVERS.items() if lever.optimizer is not None)


def levers_named(names: Collection[str]) -> tuple[Lever, ...]:
    """The levers of `LEVERS` with these names, in the order in which they are tried."""
    return tuple(lever for name, lever in LEVERS.items() if name in names)


def allowable() -> tuple[str, ...]:
    """The names in `LEVERS` that the option `allow` takes."""
    return tuple(name for name, lever in LEVERS.items() if lever.option == "allow")


def check_allow(allow: Collection[str | Lever]) -> tuple[Lever, ...]:
    """The levers in `allow` in the order in which they are tried: those of `LEVERS`, given by name or as they are, and
    then the user's own, sorted by name.

    Raises `TypeError` where `allow` is a string or no collection. Raises `ValueError` for a name that is not in
    `LEVERS` or that another option of `optimize` takes, and for two different levers of one name."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise TypeError(f"allow must be a set of lever names, such as memopt.DEFAULT_LEVERS | {{'fp8'}}, not {allow!r}")
    own: list[Lever] = []
    for lever in allow:
        name = str(lever)
        if isinstance(lever, Lever) and any(
            other.name == name and other != lever for other in (*LEVERS.values(), *own)
        ):
            raise ValueError(f"allow has two levers of the name {name!r}; give yours another name")
        if isinstance(lever, Lever) and name not in LEVERS:
            own.append(lever)
        elif name not in LEVERS:
            raise ValueError(f"allow names an unknown lever {lever!r}; known are {', '.join(sorted(allowable()))}")
        elif (option := LEVERS[name].option) != "allow":
            raise ValueError(f"{name!r} is decided by the option {option}, not by allow; take it out of allow")
    return (*levers_named(set(map(str, allow))), *sorted(own, key=lambda lever: lever.name))


def recompute_note(allow: Collection[str]) -> tuple[str, ...]:
    """For plans and errors: a sentence that `allow` leaves out "recompute", and which `allow` would keep the default
    levers; an empty tuple where it is not left out."""
    if RECOMPUTE.name in allow:
        return ()
    return (f"{RECOMPUTE_LEFT_OUT}; to keep the default levers, give {allow_with(allow)}",)


def allow_with(names: Collection[str]) -> str:
    """The text of an `allow` argument that adds these levers to the default ones, for messages."""
    added = ", ".join(map(repr, sorted(set(names) - DEFAULT_LEVERS)))
    return f"allow=memopt.DEFAULT_LEVERS | {{{added}}}" if added else "allow=memopt.DEFAULT_LEVERS"


def allow_exactly(names: Collection[str]) -> str:
    """The text of an `allow` argument with these levers and no others, for messages."""
    return allow_with(names) if set(names) >= DEFAULT_LEVERS else f"allow={{{', '.join(map(repr, sorted(names)))}}}"
