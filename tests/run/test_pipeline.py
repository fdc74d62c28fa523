"""The stages of one rank share its memory: one runs at a time while microbatches of all of them are in flight."""

from __future__ import annotations

from memopt.run.pipeline import _Load, _Together

# Stage 0 runs two forwards before the first of stage 2; then backwards in the order of their losses.
MOMENTS = (
    (0, {0: 1, 2: 0}),
    (0, {0: 2, 2: 0}),
    (2, {0: 2, 2: 1}),
    (2, {0: 2, 2: 1}),
    (0, {0: 2, 2: 0}),
    (0, {0: 1, 2: 0}),
)  # fmt: skip
LOADS = {0: _Load(100, 10, 30), 2: _Load(200, 25, 40)}


def test_microbatches_of_other_stages_count_by_what_they_hold() -> None:
    together = _Together(MOMENTS)
    assert together.forwards(0, LOADS) == 2
    assert together.forwards(2, LOADS) == 2  # itself, and two of 10 bytes


def test_the_peak_is_that_of_the_worst_moment() -> None:
    # Two of stage 0 wait while stage 2 takes 40: more than one that waits while stage 0 takes 30.
    assert _Together(MOMENTS).peak_bytes(LOADS) == 300 + 2 * 10 + 40
