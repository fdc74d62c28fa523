"""The levers that compute and keep in 8 bits: proposals, since they change the numbers of the training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memopt.capture.operators import Rewriting
from memopt.device import Hardware
from memopt.rewrite.precision.fp8 import FP8_ACTIVATIONS, LEVERS, DecideFp8, note_activations, quantizing
from memopt.rewrite.precision.pipeline import DecidePrecision

_LINEARS = (
    "large linear layers multiply in 8 bits and keep the 8-bit copy of their input: where that is faster, or, on a "
    "device without such units, where memory asks for it; "
)
FP8_LEVERS = {
    "fp8": _LINEARS + "one scale a tensor",
    "fp8_delayed": _LINEARS + "one scale a tensor, from the steps before",
    "fp8_block": _LINEARS + "one scale for each 128 values or 128 by 128 weights, for which Hopper has units",
    "mxfp8": _LINEARS + "one power of two for each 32 values or weights, for which Blackwell has units",
    FP8_ACTIVATIONS: "what activations and products keep for the backward is kept in 8 bits, where memory asks for it",
}


def fp8_lever(allow: Collection[str]) -> str:
    """Which lever on linear layers is allowed, if any. Raises ValueError where it is more than one."""
    named = [lever for lever in LEVERS if lever in allow]
    if len(named) > 1:
        raise ValueError(f"allow names {' and '.join(map(repr, named))}, which scale the same layers; name one of them")
    return named[0] if named else ""


def in_fp8(base: Rewriting, card: Hardware, lever: str, histories: str) -> Rewriting:
    """With linear layers in 8 bits, decided when their types are. Raises ValueError for a step in fp32."""
    _check_low(base, card, lever)
    rules = next((each.rules for each in base.deciders if isinstance(each, DecidePrecision)), None)
    decide = DecideFp8(card, lever=lever, histories=histories)
    return replace(base, deciders=(*base.deciders, decide if rules is None else replace(decide, rules=rules)))


def activations_in_fp8(base: Rewriting, card: Hardware) -> Rewriting:
    """With what activations keep in 8 bits. Raises ValueError for a step in fp32."""
    _check_low(base, card, FP8_ACTIVATIONS)
    return replace(base, deciders=(*base.deciders, note_activations), joint=quantizing)


def _check_low(base: Rewriting, card: Hardware, lever: str) -> None:
    if base.autocast is None:
        raise ValueError(
            f"{lever!r} in allow needs a step in 16 bits, which this one is not on {card.name!r}; give "
            "precision='bf16', or leave it out"
        )
