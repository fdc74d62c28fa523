"""The levers on layers in 8 bits: one for each way to scale their products, and one that saves activations so."""

from __future__ import annotations

from functools import partial

from memopt.capture.operators import Rewriting
from memopt.device import Hardware
from memopt.levers.lever import Deciders, GraphChange, Lever
from memopt.levers.precision import DecidePrecision
from memopt.rewrite.dtypes import Rules
from memopt.rewrite.narrow import FP8_ACTIVATIONS as SAVED_IN_FP8
from memopt.rewrite.narrow import DecideFp8, has_units, note_activations, quantizing


def _lever(name: str, scaling: str, scales: str) -> Lever:
    def decide(base: Rewriting, card: Hardware, histories: str) -> Deciders:
        rules = next((decider.rules for decider in base.deciders if isinstance(decider, DecidePrecision)), Rules())
        return (DecideFp8(card, rules, name, scaling, histories),)

    return Lever(
        name,
        f"Large linear layers multiply in 8 bits and save the 8-bit copy of their input, with {scales}.",
        "approximate",
        "quantization error in activations, weights and gradients; needs a step in 16 bits",
        graph=GraphChange(
            decide,
            "with",
            faster=partial(has_units, scaling=scaling),
            needs_low=True,
            exclusive="scale the same layers",
        ),
    )


FP8 = _lever("fp8", "current", "one current scale per tensor")
FP8_DELAYED = _lever("fp8_delayed", "delayed", "one scale per tensor from the largest values of earlier steps")
FP8_BLOCK = _lever("fp8_block", "block", "one scale per 128 values, or per 128 by 128 weights, as Hopper supports")
MXFP8 = _lever("mxfp8", "mx", "one power of two per 32 values or weights, as Blackwell supports")
FP8_ACTIVATIONS = Lever(
    SAVED_IN_FP8,
    "Activation functions and products save their operands in 8 bits where memory is short.",
    "approximate",
    "quantization error in gradients; needs a step in 16 bits",
    graph=GraphChange((note_activations,), "with", joint=quantizing, needs_low=True),
)
