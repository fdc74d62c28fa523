"""The levers that compute and save in 8 bits; used only if `allow` names them, since they change the numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from memopt.capture.operators import Rewriting
from memopt.device import Hardware
from memopt.rewrite.precision.fp8 import FP8_ACTIVATIONS, LEVERS, DecideFp8, note_activations, quantizing
from memopt.rewrite.precision.pipeline import DecidePrecision

_LINEARS = (
    "large linear layers multiply in 8 bits and save the 8-bit copy of their input: where that is faster, or, on a "
    "device without 8-bit units, where memory requires it; "
)
FP8_LEVERS = {
    "fp8": _LINEARS + "one scale a tensor",
    "fp8_delayed": _LINEARS + "one scale a tensor, from the steps before",
    "fp8_block": _LINEARS + "one scale for each 128 values or 128 by 128 weights, for which Hopper has units",
    "mxfp8": _LINEARS + "one power of two for each 32 values or weights, for which Blackwell has units",
    FP8_ACTIVATIONS: "what activations and products save for the backward is saved in 8 bits, where memory requires it",
}


def fp8_lever(allow: Collection[str]) -> str:
    """Returns the allowed 8-bit lever on linear layers, or "". Raises ValueError if more than one is allowed."""
    named = [lever for lever in LEVERS if lever in allow]
    if len(named) > 1:
        raise ValueError(f"allow names {' and '.join(map(repr, named))}, which scale the same layers; name one of them")
    return named[0] if named else ""


def in_fp8(base: Rewriting, card: Hardware, lever: str, histories: str) -> Rewriting:
    """Returns a rewriting with linear layers in 8 bits. Raises ValueError for a step in fp32."""
    _check_low(base, card, lever)
    rules = next((decider.rules for decider in base.deciders if isinstance(decider, DecidePrecision)), None)
    decide = DecideFp8(card, lever=lever, histories=histories)
    return replace(base, deciders=(*base.deciders, decide if rules is None else replace(decide, rules=rules)))


def activations_in_fp8(base: Rewriting, card: Hardware) -> Rewriting:
    """Returns a rewriting that saves activations in 8 bits. Raises ValueError for a step in fp32."""
    _check_low(base, card, FP8_ACTIVATIONS)
    return replace(base, deciders=(*base.deciders, note_activations), joint=quantizing)


def _check_low(base: Rewriting, card: Hardware, lever: str) -> None:
    if base.autocast is None:
        raise ValueError(
            f"{lever!r} in allow needs a step in 16 bits, which this one is not on {card.name!r}; give "
            "precision='bf16', or leave it out"
        )
