"""A training step of five ops, small enough for its bytes and seconds to be worked out by hand."""

from __future__ import annotations

from memopt.solver.problem import Op, RematProblem, Storage

# The live bytes of both schedules, and the seconds of the first storage's recomputation.
SAVE_ALL, SAVE_ALL_BYTES = (0, 1, 2, 3, 4), [104, 109, 107, 112, 110]
RECOMPUTED, RECOMPUTED_BYTES, ADDED_SECONDS = (0, 1, 2, 3, 0, 4), [104, 109, 103, 108, 109, 110], 1.0


def small_step() -> RematProblem:
    """Forward a → b → c, then d, which reads c and b, and e, which reads d and a and makes a result."""
    ops = (
        Op("a", 1.0, (), (0,)),
        Op("b", 2.0, (0,), (1,), workspace_bytes=3),
        Op("c", 4.0, (1,), (2,)),
        Op("d", 8.0, (2, 1), (3,)),
        Op("e", 16.0, (3, 0), (4,)),
    )
    sizes = {"a": 4, "b": 2, "c": 1, "d": 5, "e": 1}
    storages = tuple(Storage(name, size, kept=name == "e") for name, size in sizes.items())
    return RematProblem(ops, storages, forward_ops=3, resident_bytes=100)
