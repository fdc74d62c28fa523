from __future__ import annotations

from memopt.account.allocator_replay import step_calls, step_ways
from memopt.account.caching_allocator import MB
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


# input → hidden (a large result, whose sum is the loss) → loss; two gradients, of which the first reads `hidden`.
HIDDEN = RematProblem(
    (
        op("input", (), (0,)),
        op("hidden", (0,), (1,)),
        op("loss", (1,), (2,)),
        op("gradient", (0,), (3,)),
        op("further", (3,), (4,)),
    ),
    (
        Storage("a", MB),
        Storage("hidden", 2 * MB, kept=True),
        Storage("loss", 4, kept=True),
        Storage("g", 3 * MB),
        Storage("h", 5 * MB, kept=True),
    ),
    forward_ops=3,
)


def test_a_large_result_may_be_dropped_before_the_backward() -> None:
    """As `model(**batch).loss.backward()` drops all but the loss."""
    kept, dropped = step_ways(HIDDEN, Schedule.save_all(HIDDEN))
    frees = [[call.block for call in calls if not call.allocates] for calls in (kept, dropped)]
    numbers = {call.bytes: call.block for call in kept if call.allocates}
    assert numbers[2 * MB] not in frees[0]
    backward = next(at for at, call in enumerate(dropped) if call.bytes == 3 * MB)
    assert numbers[2 * MB] in [call.block for call in dropped[:backward] if not call.allocates]


def test_a_result_that_the_backward_reads_lives_until_then() -> None:
    ops = list(HIDDEN.ops)
    ops[3] = op("gradient", (0, 1), (3,))
    problem = RematProblem(tuple(ops), HIDDEN.storages, forward_ops=3)
    _, dropped = step_ways(problem, Schedule.save_all(problem))
    number = next(call.block for call in dropped if call.bytes == 2 * MB)
    freed = next(at for at, call in enumerate(dropped) if call.block == number and not call.allocates)
    made = [call.bytes for call in dropped[:freed] if call.allocates]
    assert made == [MB, 2 * MB, 4, 3 * MB]


def test_small_results_are_looked_at_in_one_way() -> None:
    assert len(step_ways(CHAIN, Schedule.save_all(CHAIN))) == 1
