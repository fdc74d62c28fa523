import random

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, transformer
from memopt.solver.chain import chain_of, choices_of
from memopt.solver.problem import RematProblem


def names(problem: RematProblem, ops: range) -> str:
    return f"{problem.ops[ops.start].name} to {problem.ops[ops.stop - 1].name}" if ops else "none"


def test_a_transformer_is_cut_before_its_norms_and_gradients_go_to_the_block_that_consumes() -> None:
    problem = transformer(2)
    lines = [
        f"{names(problem, block.forward):30} {names(problem, block.backward)}"
        for block in chain_of(problem, most_blocks=5).blocks
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
embedding to embedding         sum to embedding.weight_grad
0.norm1 to 0.down.add          sum to 0.norm1.grad
1.norm1 to 1.down.add          1.down.add.grad to 1.norm1.grad
norm to loss                   loss.grad to norm.grad""",
    )


@given(st.integers(0, 10**6), st.integers(2, 12))
def test_blocks_cover_the_step_in_order(number: int, most_blocks: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 20))
    blocks = chain_of(problem, most_blocks).blocks
    assert [op for block in blocks for op in block.forward] == list(range(problem.forward_ops))
    backward = [op for block in reversed(blocks) for op in block.backward]
    assert backward == list(range(problem.forward_ops, len(problem.ops)))


def test_what_enters_a_later_block_counts_what_crosses_an_earlier_one_once() -> None:
    problem = chain(6)
    extra = chain_of(problem, most_blocks=10).extra_bytes
    assert [int(extra[0, c]) for c in range(1, 6)] == [10] * 5
    assert int(extra[2, 2]) == int(extra[3, 1]) == 0


def test_layers_that_look_alike_share_their_options() -> None:
    problem = transformer(12)
    chain_blocks = chain_of(problem, most_blocks=64)
    choices = choices_of(problem, chain_blocks)
    seconds = [tuple(option.seconds for option in choice.options) for choice in choices]
    assert len(seconds) > 20
    assert len(set(seconds)) < 12


def test_options_trade_bytes_for_seconds() -> None:
    problem = transformer(4)
    for choice in choices_of(problem, chain_of(problem, most_blocks=9)):
        saved = [option.saved_bytes for option in choice.options]
        assert saved == sorted(saved)
        assert choice.options[-1].seconds == min(option.seconds for option in choice.options)
