"""How the end-to-end tests compare two training steps."""

from __future__ import annotations

import torch

from examples.models.step import Step


def assert_equal(step: Step, plain: Step, tolerance: float = 0.0) -> None:
    """Assert that loss, gradients and buffers are the same bits, or within `tolerance` of the largest value of each."""
    assert step.gradients.keys() == plain.gradients.keys()
    assert step.buffers.keys() == plain.buffers.keys()
    pairs = {"loss": (step.loss, plain.loss)}
    pairs |= {f"gradient of {n}": (step.gradients[n], plain.gradients[n]) for n in plain.gradients}
    pairs |= {f"buffer {n}": (step.buffers[n], plain.buffers[n]) for n in plain.buffers}
    for name, (ours, theirs) in pairs.items():
        if tolerance:
            error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
            assert error <= tolerance, f"{name} differs by {error:.2e} of its largest value"
        else:
            assert torch.equal(ours, theirs), f"{name} differs"
