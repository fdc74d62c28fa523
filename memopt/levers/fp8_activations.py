"""The lever that saves activations in 8 bits for the backward."""

from __future__ import annotations

from memopt.levers.lever import GraphChange, Lever
from memopt.rewrite.narrow import FP8_ACTIVATIONS as NAME
from memopt.rewrite.narrow import note_activations, quantizing

FP8_ACTIVATIONS = Lever(
    NAME,
    "Activation functions and products save their operands in 8 bits where memory is short.",
    "approximate",
    "quantization error in gradients; needs a step in 16 bits",
    graph=GraphChange((note_activations,), "with", joint=quantizing, needs_low=True),
)
