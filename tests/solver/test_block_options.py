from examples.models.problems import chain
from memopt.solver.chain import Choices, Option, chain_of, choices_of


def test_blocks_of_one_op_save_what_they_make() -> None:
    problem = chain(4)
    choices = choices_of(problem, chain_of(problem, 4))
    assert [len(choice.options) for choice in choices] == [1, 1, 1, 1]
    saved = Option(
        forward=(1,),
        backward=(7,),
        saved_bytes=10,
        forward_bytes=10,
        backward_bytes=10,
        seconds=0.0,
        again_seconds=1.0,
        alone_seconds=0.0,
        alone_bytes=0,
    )
    assert choices[1] == Choices((saved,), unsaved_bytes=10, unsaved_seconds=1.0, base_bytes=10)


def test_equal_blocks_have_equal_options_for_their_own_ops() -> None:
    problem = chain(4)
    _, second, third, _ = choices_of(problem, chain_of(problem, 4))
    assert (second.options[0].forward, third.options[0].forward) == ((1,), (2,))
    assert (second.options[0].backward, third.options[0].backward) == ((7,), (6,))
    assert second.options[0].saved_bytes == third.options[0].saved_bytes
