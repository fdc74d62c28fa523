"""Random kernels of inductor's code depend on each other in the order of the graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
from memopt.compat import inductor_lowering
from memopt.compat.inductor import _fake_generator_states
from memopt.compat.inductor_lowering import keep_random_order

aten: Any = torch.ops.aten


def unread_dropout(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The second of three dropouts returns what nobody reads."""
    first = aten.native_dropout(x, 0.5, True)[0]
    aten.native_dropout(aten.mm(x, weight), 0.5, True)
    return aten.native_dropout(aten.sum(first, [1]), 0.5, True)[0]


def saved_state(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The second of three random operators saves the generator's state, for a backward that draws again."""
    first = aten.native_dropout(x, 0.5, True)[0]
    save = torch.ops.higher_order.run_and_save_rng_state
    _state, second = save(aten.bernoulli.p, aten.mm(x, weight), 0.5)
    return aten.native_dropout(x, 0.5, True)[0] + first + second


@pytest.mark.parametrize("program", [unread_dropout, saved_state])
def test_each_random_kernel_depends_on_the_one_before(program: Any) -> None:
    inputs = torch.randn(8, 8), torch.randn(8, 8)
    in_order: list[bool] = []

    def noting(nodes: list[Any]) -> list[Any]:
        kept = keep_random_order(nodes)
        random = [node for node in kept if inductor_lowering._draws(node.node)]
        for before, after in pairwise(random):
            in_order.append(before.get_name() in after.ancestors)
        return kept

    with inductor_config.patch(fallback_random=True, force_disable_caches=True, _pre_fusion_custom_pass=noting):
        from torch._inductor.compile_fx import compile_fx_inner

        graph = make_fx(lambda *given: (program(*given),), tracing_mode="fake")(*inputs)
        compiled: Any = compile_fx_inner(graph, inputs)
    assert in_order == [True, True]
    torch.manual_seed(0)
    expected = program(*inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(list(inputs))[0], expected)


def test_a_fake_draw_from_a_state_that_was_saved_in_the_same_graph() -> None:
    operators: Any = torch.ops.higher_order
    with FakeTensorMode(), _fake_generator_states():
        given = torch.ones(4)
        state, drawn = operators.run_and_save_rng_state(aten.bernoulli.p, given, 0.5)
        again = operators.run_with_rng_state(state, aten.bernoulli.p, given, 0.5)
    assert all(isinstance(value, FakeTensor) for value in (state, drawn, again))
    assert (state.shape, state.dtype) == (torch.get_rng_state().shape, torch.uint8)


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.dropout(hidden.relu())
        loss: torch.Tensor = self.dropout(hidden).square().mean()
        return loss


@pytest.mark.slow
def test_a_pass_of_the_user_runs_too() -> None:
    passed: list[int] = []

    def users(nodes: list[Any]) -> list[Any]:
        passed.append(len(nodes))
        return nodes

    planned, plain, x = Dropouts(), Dropouts(), torch.randn(8, 8)
    planned.load_state_dict(plain.state_dict())
    with inductor_config.patch(fallback_random=True, force_disable_caches=True, _pre_fusion_custom_pass=users):
        memopt.optimize(planned, 1.0, example_inputs=(x,), precision="fp32", backend="inductor")
        losses = []
        for model in (plain, planned):
            torch.manual_seed(0)
            losses.append(model(x))
            losses[-1].backward()
    assert passed
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(planned.linear.weight.grad, plain.linear.weight.grad)
