"""The levers that compute and keep in 8 bits: proposals, since they change the numbers of the training."""

from __future__ import annotations

from dataclasses import replace

from memopt.capture.operators import Rewriting
from memopt.precision.fp8 import FP8, FP8_ACTIVATIONS, DecideFp8, note_activations, quantizing
from memopt.precision.pipeline import DecidePrecision
from memopt.pricing import Hardware

FP8_LEVERS = {
    FP8: "large linear layers multiply in 8 bits and keep the 8-bit copy of their input: where that is faster, or, on a "
    "device without such units, where memory asks for it",
    FP8_ACTIVATIONS: "what activations and products keep for the backward is kept in 8 bits, where memory asks for it",
}


def in_fp8(base: Rewriting, card: Hardware) -> Rewriting:
    """With linear layers in 8 bits, decided when their types are. Raises ValueError for a step in fp32."""
    if base.autocast is None:
        raise ValueError(
            f"{FP8!r} in allow needs a step in 16 bits, which this one is not on {card.name!r}; give precision='bf16', "
            "or leave it out"
        )
    rules = next((each.rules for each in base.deciders if isinstance(each, DecidePrecision)), None)
    decide = DecideFp8(card) if rules is None else DecideFp8(card, rules)
    return replace(base, deciders=(*base.deciders, decide))


def activations_in_fp8(base: Rewriting, card: Hardware) -> Rewriting:
    """With what activations keep in 8 bits. Raises ValueError for a step in fp32."""
    if base.autocast is None:
        raise ValueError(
            f"{FP8_ACTIVATIONS!r} in allow needs a step in 16 bits, which this one is not on {card.name!r}; give "
            "precision='bf16', or leave it out"
        )
    return replace(base, deciders=(*base.deciders, note_activations), joint=quantizing)
