from expecttest import assert_expected_inline

from examples.models.problems import chain, text, transformer
from memopt.solver.protocol import checkpointed, forward_blocks, recipes
from memopt.solver.simulator import simulate


def test_names_peaks_and_seconds_of_a_transformer() -> None:
    problem = transformer(12)
    lines = []
    for name, schedule in recipes(problem).items():
        simulation = simulate(problem, schedule)
        added = simulation.added_seconds / problem.seconds
        lines.append(f"{name:16} {simulation.peak_bytes / 2**20:7.1f} MiB {added:6.1%}")
    assert_expected_inline(
        "\n".join(lines),
        """\
save all          2967.8 MiB   0.0%
per block          659.1 MiB  21.6%
every 2 blocks     862.1 MiB  21.9%
every 3 blocks    1065.1 MiB  22.0%
every 4 blocks    1268.1 MiB  22.0%
every 6 blocks    1674.1 MiB  22.1%
sqrt(L) segments  1268.1 MiB  22.0%
attention only    2819.3 MiB   1.5%""",
    )


def test_a_block_is_recomputed_from_what_enters_it() -> None:
    problem = chain(7)
    blocks = [-1, 0, 0, 1, 1, 2, 2]
    assert_expected_inline(
        text(problem, checkpointed(problem, blocks, 1)),
        """0 1 2 3 4 5 6 loss.grad (5) 6.grad 5.grad (3) 4.grad 3.grad (1) 2.grad 1.grad""",
    )


def test_without_blocks_the_forward_is_cut_where_little_crosses() -> None:
    problem = transformer(4, blocks=False)
    blocks = forward_blocks(problem)
    first_ops = [problem.ops[blocks.index(block)].name for block in range(max(blocks) + 1)]
    assert_expected_inline(
        " ".join(first_ops),
        """embedding 0.norm2 1.norm1 1.norm2 2.norm1 2.norm2 3.norm1 3.norm2""",
    )
    assert set(recipes(problem)) >= {"save all", "per block", "sqrt(L) segments", "attention only"}


def test_a_uniform_chain_has_segments_too() -> None:
    problem = chain(16)
    schedules = recipes(problem)
    assert (
        simulate(problem, schedules["sqrt(L) segments"]).peak_bytes
        < simulate(problem, schedules["save all"]).peak_bytes
    )
