from __future__ import annotations

from memopt.account.step_calls import step_calls
from memopt.solver import Offload, Op, RematProblem, Schedule, Storage


def op(name: str, reads: tuple[int, ...], makes: tuple[int, ...], **further: object) -> Op:
    return Op(name, 1.0, reads, makes, **further)  # type: ignore[arg-type]


def sizes(problem: RematProblem, schedule: Schedule) -> list[int]:
    """The bytes of the calls in order, negative where a block is freed."""
    found, held = [], {}
    for allocates, block, nbytes in step_calls(problem, schedule):
        held[block] = nbytes if allocates else held[block]
        found.append(held[block] if allocates else -held[block])
    return found


CHAIN = RematProblem(
    (
        op("input", (), (0,)),
        op("unused", (0,), (1,)),
        op("narrow", (1,), (2,)),
        op("loss", (0,), (3,)),
        op("gradient", (2,), (4,)),
    ),
    (Storage("a", 10), Storage("b", 20), Storage("c", 40), Storage("loss", 1, kept=True), Storage("g", 80, kept=True)),
    forward_ops=4,
)


def test_what_nothing_reads_before_it_is_recomputed_is_not_allocated() -> None:
    """The forward evaluates every operator once, and code that is emitted from it has those alone that are read."""
    recomputed = Schedule((0, 1, 2, 3, 1, 2, 4))
    assert sizes(CHAIN, recomputed) == [10, 1, 20, -10, 40, -20, 80, -40]
    assert sizes(CHAIN, Schedule.save_all(CHAIN)) == [10, 20, 40, -20, 1, -10, 80, -40]


def test_what_must_run_once_is_allocated_though_nothing_reads_it() -> None:
    ops = list(CHAIN.ops)
    ops[1] = op("effect", (0,), (1,), recomputable=False)
    problem = RematProblem(tuple(ops[:2] + ops[3:4]), CHAIN.storages[:4], forward_ops=3)
    assert sizes(problem, Schedule((0, 1, 2))) == [10, 20, -20, 1, -10]


def test_a_fetched_value_gets_its_block_before_the_operator_that_runs_then() -> None:
    offload = Offload(storage=0, out_after=0, freed_before=2, fetch_from=4, back_before=4)
    ops = (
        op("input", (), (0,)),
        op("next", (0,), (1,)),
        op("narrow", (1,), (2,)),
        op("loss", (2,), (3,)),
        op("gradient", (0, 2), (4,)),
    )
    problem = RematProblem(ops, CHAIN.storages, forward_ops=4)
    schedule = Schedule((0, 1, 2, 3, 4), (offload,))
    assert sizes(problem, schedule) == [10, 20, -10, 40, -20, 1, 10, 80, -40, -10]
