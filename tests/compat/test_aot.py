from __future__ import annotations

import weakref

import torch
from torch import fx

from memopt.compat.tracing import boxed, mark_boxed


def test_a_boxed_module_frees_each_input_after_its_last_use() -> None:
    alive: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        alive.append(seen() is not None)
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.add, (x, x))
    graph.output((graph.call_function(note, (doubled,)),))
    run = boxed(fx.GraphModule({}, graph))
    given = torch.ones(2)
    seen = weakref.ref(given)
    arguments = [given]
    del given
    (result,) = run(arguments)
    assert result.tolist() == [2, 2]
    assert arguments == []
    assert alive == [False]


def test_a_boxed_module_runs_without_autocast() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.mm, (x, x)),))
    run = boxed(fx.GraphModule({}, graph))
    with torch.autocast("cpu", torch.bfloat16):
        assert run([torch.ones(2, 2)])[0].dtype == torch.float32


def test_the_mark_of_a_boxed_function() -> None:
    def call(arguments: list[object]) -> None: ...

    assert mark_boxed(call) is call
    assert call._boxed_call is True  # type: ignore[attr-defined]


def test_emitted_graphs_find_the_operator_that_saves_generator_states() -> None:
    assert torch.ops.higher_order.run_and_save_rng_state is not None
