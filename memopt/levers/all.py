"""All levers of memopt, and the check of the option `allow`, which names the levers that a plan may use. The search for
a plan tries them in the order of `LEVERS`, after those that make the step faster on its device.

Levers that change neither the captured graph nor the optimizer are here: other stages apply them, as `tried_by`
says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from memopt.compat.card import may_turn_on_expandable_segments
from memopt.device import Hardware
from memopt.levers.chunked_loss import CHUNKED_LOSS
from memopt.levers.fp8 import FP8, FP8_ACTIVATIONS, FP8_BLOCK, FP8_DELAYED, MXFP8
from memopt.levers.fused_ops import FUSED_ATTENTION, FUSED_OPS
from memopt.levers.lever import Lever
from memopt.levers.optimizer_levers import BF16_PARAMETERS, LOW_BIT_OPTIMIZER, OFFLOAD_OPTIMIZER, OPTIMIZER_IN_BACKWARD
from memopt.levers.precision import PRECISION
from memopt.levers.tiles import TILES
from memopt.solver import Link

RECOMPUTE = Lever(
    "recompute",
    "Activations are recomputed in the backward instead of saved from the forward.",
    "bitwise",
    "the time of the recomputed operators, as little of it as any schedule within the budget needs",
    default=True,
    tried_by="the solver",
)
RECOMPUTE_LEFT_OUT = f"nothing is recomputed, since allow leaves out {RECOMPUTE.name!r}"
REINPLACE = Lever(
    "reinplace",
    "Results of the backward overwrite operands that are not read again, and operators that free memory run first.",
    "bitwise",
    "nothing; backend 'inductor' does it by itself",
    default=True,
    tried_by="every plan",
)
MICROBATCH = Lever(
    "microbatch",
    "TrainStep splits a batch that does not fit otherwise into smaller ones, unless the model has batch normalisation.",
    "rounding",
    "smaller kernels, and dropout draws different random numbers; for TrainStep only",
    default=True,
    tried_by="TrainStep",
)
OFFLOAD_ACTIVATIONS = Lever(
    "offload_activations",
    "Saved activations are copied to pinned host memory in the forward, and back in the backward.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; not on a CPU",
    default=True,
    tried_by="the solver",
)
OFFLOAD_PARAMETERS = Lever(
    "offload_parameters",
    "Frozen parameters are held in pinned host memory, and copied to the device before each use.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; for forwards without graph breaks and backend "
    "'aten'; not on a CPU",
    tried_by="the solver",
)
EXPANDABLE_SEGMENTS = Lever(
    "expandable_segments",
    "torch's CUDA allocator uses expandable segments, with which it leaves fewer holes between blocks.",
    "bitwise",
    "a setting of the whole process, which stays; not beside a `torch.cuda.MemPool`, such as vLLM's; not on a CPU",
    default=True,
    tried_by="the search, where a plan with ordinary segments does not fit or adds more time",
)
SEGMENTS_NOTE = (
    "torch's allocator uses expandable segments from the first planned step on, for the whole process, since it then "
    f"leaves fewer holes between blocks; without {EXPANDABLE_SEGMENTS.name!r} in allow it keeps ordinary ones"
)
PLAIN = Lever(
    "plain",
    "A model whose forward cannot be captured runs as it is, without a plan.",
    "bitwise",
    "the budget is not held",
    tried_by="a call that cannot be captured",
)

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


def offload_link(card: Hardware, allow: Collection[str]) -> Link | None:
    """Returns the card's link to the host's memory. None where the device has no such link, as a CPU, or `allow`
    names no lever that uses it."""
    link = card.link
    used = {OFFLOAD_ACTIVATIONS.name, OFFLOAD_PARAMETERS.name}.intersection(allow)
    return link if used and link.bytes_per_second > 0 else None


def may_expand(allow: Collection[str]) -> bool:
    """Whether a plan may turn expandable segments on: `allow` has the lever, they are not in use yet, and the
    environment (`PYTORCH_CUDA_ALLOC_CONF`) does not turn them off."""
    return EXPANDABLE_SEGMENTS.name in allow and may_turn_on_expandable_segments()
