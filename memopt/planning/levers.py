"""Every lever that `allow` takes: what it does, how exact it is, whether it is on by default, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from memopt.optimizers import BF16_PARAMETERS, OPTIMIZER_IN_BACKWARD
from memopt.rewrite import OFFLOAD_ACTIVATIONS, REINPLACE

Exactness: TypeAlias = Literal["bitwise", "rounding", "approximate"]
"""How losses and gradients compare with those of the plain model: equal to the last bit; equal but for rounding; or
close, where training itself changes."""

RECOMPUTE = "recompute"
MICROBATCH = "microbatch"
PLAIN = "plain"
RECOMPUTE_LEFT_OUT = f"nothing is recomputed, since allow leaves out {RECOMPUTE!r}"

_EIGHT_BIT_LINEARS = "Large linear layers multiply in 8 bits and save the 8-bit copy of their input, with "
_EIGHT_BIT_PRICE = "quantization error in activations, weights and gradients; needs a step in 16 bits"


@dataclass(frozen=True)
class Lever:
    """One way to make a training step smaller or faster."""

    name: str
    """As `allow` takes it."""
    what: str
    """The lever's effect, in one sentence."""
    exactness: Exactness
    default: bool
    """Whether `allow` holds it unless told otherwise."""
    price: str
    """The lever's cost in time, memory or exactness."""


LEVERS: Mapping[str, Lever] = MappingProxyType(
    {
        lever.name: lever
        for lever in (
            Lever(
                RECOMPUTE,
                "Activations are recomputed in the backward instead of saved from the forward.",
                "bitwise",
                True,
                "the time of the recomputed operators, as little of it as any schedule within the budget needs",
            ),
            Lever(
                REINPLACE,
                "Results of the backward are written over operands that are not read again.",
                "bitwise",
                True,
                "nothing; backend 'inductor' does it by itself",
            ),
            Lever(
                "fused_ops",
                "GELU, SiLU and layer norms that are written out run as one kernel each, which saves its input only.",
                "rounding",
                True,
                "nothing",
            ),
            Lever(
                "fused_attention",
                "Attention that is written out runs as one kernel, which saves no probabilities.",
                "rounding",
                True,
                "nothing",
            ),
            Lever(
                "chunked_loss",
                "The cross entropy of a linear layer is computed in chunks, without holding the logits.",
                "rounding",
                True,
                "up to one more product with the layer's weight",
            ),
            Lever(
                MICROBATCH,
                "TrainStep splits a batch that fits in no other way into smaller ones.",
                "rounding",
                True,
                "smaller kernels, and dropout draws different random numbers; for TrainStep only",
            ),
            Lever(
                OFFLOAD_ACTIVATIONS,
                "Saved activations are copied to pinned host memory in the forward, and back in the backward.",
                "bitwise",
                True,
                "host memory, and waiting for copies that compute does not hide; not on a CPU",
            ),
            Lever("fp8", _EIGHT_BIT_LINEARS + "one current scale per tensor.", "approximate", False, _EIGHT_BIT_PRICE),
            Lever(
                "fp8_delayed",
                _EIGHT_BIT_LINEARS + "one scale per tensor from the largest values of earlier steps.",
                "approximate",
                False,
                _EIGHT_BIT_PRICE,
            ),
            Lever(
                "fp8_block",
                _EIGHT_BIT_LINEARS + "one scale per 128 values, or per 128 by 128 weights, as Hopper supports.",
                "approximate",
                False,
                _EIGHT_BIT_PRICE,
            ),
            Lever(
                "mxfp8",
                _EIGHT_BIT_LINEARS + "one power of two per 32 values or weights, as Blackwell supports.",
                "approximate",
                False,
                _EIGHT_BIT_PRICE,
            ),
            Lever(
                "fp8_activations",
                "Activation functions and products save their operands in 8 bits where memory is short.",
                "approximate",
                False,
                "quantization error in gradients; needs a step in 16 bits",
            ),
            Lever(
                BF16_PARAMETERS,
                "Parameters and gradients are held in bfloat16, with stochastic rounding in the optimizer's step.",
                "approximate",
                False,
                "rounding of every update; needs a step in bf16, and memopt.wrap_optimizer",
            ),
            Lever(
                "low_bit_optimizer",
                "Adam's two moments are held in 8 bits.",
                "approximate",
                False,
                "quantization error in the moments; for Adam and AdamW only, and needs memopt.wrap_optimizer",
            ),
            Lever(
                "offload_optimizer",
                "The optimizer's state is held in host memory and copied piece by piece for its step.",
                "bitwise",
                False,
                "host memory and the time of the copies (but for rounding where the host steps); needs "
                "memopt.wrap_optimizer; not on a CPU",
            ),
            Lever(
                OPTIMIZER_IN_BACKWARD,
                "Each parameter is stepped, and its gradient freed, as soon as the backward has it.",
                "bitwise",
                False,
                "no clipping by the norm of all gradients, no GradScaler, no accumulation, no TrainStep; for backend "
                "'aten', and needs memopt.wrap_optimizer",
            ),
            Lever(
                PLAIN,
                "A model whose forward cannot be captured runs as it is, without a plan.",
                "bitwise",
                False,
                "the budget is not held",
            ),
        )
    }
)
"""All levers by name, in the order in which a plan tries them where it may."""

DEFAULT_LEVERS = frozenset(lever.name for lever in LEVERS.values() if lever.default)


def check_allow(allow: Collection[str]) -> frozenset[str]:
    """The lever names in `allow`. Raises `TypeError`, and `ValueError` for a name that is not in `LEVERS`."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise TypeError(f"allow must be a set of lever names, such as memopt.DEFAULT_LEVERS | {{'fp8'}}, not {allow!r}")
    for name in allow:
        if name not in LEVERS:
            raise ValueError(f"allow names an unknown lever {name!r}; known are {', '.join(sorted(LEVERS))}")
    return frozenset(allow)


def recompute_note(allow: Collection[str]) -> tuple[str, ...]:
    """A sentence for plans and refusals where `allow` leaves recomputation out; else nothing."""
    if RECOMPUTE in allow:
        return ()
    return (f"{RECOMPUTE_LEFT_OUT}; to keep the default levers, give {allow_with(allow)}",)


def allow_with(names: Collection[str]) -> str:
    """The argument that adds levers to the default ones, as users write it."""
    added = ", ".join(map(repr, sorted(set(names) - DEFAULT_LEVERS)))
    return f"allow=memopt.DEFAULT_LEVERS | {{{added}}}" if added else "allow=memopt.DEFAULT_LEVERS"
