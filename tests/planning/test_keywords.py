from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from typing_extensions import Unpack

import memopt
from memopt.planning.options import PlanOptions, StepOptions, check_options, takes_options


class Oven(TypedDict, total=False):
    """Options of `bake`."""

    degrees: int
    minutes: float


@takes_options(Oven, {"degrees": 180, "minutes": 30.0, "unused": ""})
def bake(cake: str, *, tray: int = 1, **options: Unpack[Oven]) -> tuple[str, int, Oven]:
    """Bake a cake."""
    return cake, tray, options


def test_options_go_through() -> None:
    assert bake("plum", tray=2, degrees=200) == ("plum", 2, {"degrees": 200})
    assert bake(cake="plum") == ("plum", 1, {})


def test_the_signature_lists_all() -> None:
    assert str(inspect.signature(bake)) == (
        "(cake: 'str', *, tray: 'int' = 1, degrees: 'int' = 180, minutes: 'float' = 30.0) -> 'tuple[str, int, Oven]'"
    )
    assert (bake.__name__, bake.__doc__) == ("bake", "Bake a cake.")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("degree", r"bake\(\) takes no option 'degree'; did you mean 'degrees'\?"),
        ("try", r"takes no option 'try'; did you mean 'tray'\?"),
        ("unused", r"takes no option 'unused'; it takes cake, tray, degrees, minutes"),
    ],
)
def test_wrong_names(wrong: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        bake("plum", **{wrong: 1})  # type: ignore[typeddict-item]


API: list[Callable[..., Any]] = [memopt.optimize, memopt.plan, memopt.frontier, memopt.max_batch, memopt.max_length]


@pytest.mark.parametrize("function", API, ids=lambda function: function.__name__)
def test_all_take_the_same_options(function: Callable[..., Any]) -> None:
    kind = StepOptions if function is memopt.optimize else PlanOptions
    taken = inspect.signature(function).parameters
    for name in kind.__annotations__:
        assert taken[name] == inspect.signature(check_options).parameters[name]
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) takes no option 'pasess'; did you mean 'passes'\?"):
        function(None, 1, None, pasess=())


def test_every_option_is_checked() -> None:
    assert set(PlanOptions.__annotations__) == set(inspect.signature(check_options).parameters) - {"budget_gb"}
    with pytest.raises(TypeError, match="takes no option 'device'"):
        memopt.optimize(None, 1, device="h100")  # type: ignore[type-var, call-arg]


def test_max_length_is_a_function_of_its_own() -> None:
    assert memopt.max_length is not memopt.max_batch
    assert memopt.max_length.__name__ == "max_length"
    assert "longest sequence" in str(memopt.max_length.__doc__)
    assert inspect.signature(memopt.max_length) == inspect.signature(memopt.max_batch)


def test_the_docstring_names_all() -> None:
    text = inspect.getdoc(memopt.optimize)
    assert text is not None
    assert not [name for name in StepOptions.__annotations__ if f"\n    {name}: " not in text]
