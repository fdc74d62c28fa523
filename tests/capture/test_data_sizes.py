"""Sizes that depend on data: what a run observes, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.capture.data_sizes import Observed, limits_by_operators, most_observed, observe, without_limit
from memopt.compat.symbols import plain_symbol


class Picks(nn.Module):
    """Draws, writes to a buffer, picks rows by a mask, and then raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fails = nn.BatchNorm1d(4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.dropout(x, 0.5, train=True))
        if self.fails:
            raise ZeroDivisionError
        return x[torch.arange(len(x)) > 1].sum()


def test_the_results_of_data_dependent_operators_are_observed() -> None:
    model = Picks().train()
    (picked,) = observe(model, ((), {}), lambda: model(torch.randn(8, 4)))
    assert (picked.op, picked.result) == ("aten.index.Tensor", (6, 4))


def test_the_numbers_of_a_list_are_observed_one_by_one_as_they_are_captured() -> None:
    model, sizes = Picks(), torch.tensor([[3, 5], [7, 2]])
    observed = observe(model, ((), {}), lambda: (sizes.tolist(), torch.rand(2).tolist(), sizes[0, 0].tolist()))
    assert [call.result for call in observed] == [3, 5, 7, 2, 3]
    assert {call.op for call in observed} == {"aten._local_scalar_dense.default"}


def test_a_truth_value_that_code_branches_on_is_not_taken_for_a_size() -> None:
    sizes = torch.tensor([3, 5])  # transformers looks at a mask so in eager mode, and not where it is captured
    observed = observe(Picks(), ((), {}), lambda: (bool((sizes > 4).all()), sizes[0].item()))
    assert [call.result for call in observed] == [3]


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_and_generators_are_as_before_also_where_the_forward_raises(fails: bool) -> None:
    model = Picks().train()
    model.fails = fails
    mean, state = model.norm.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]
    try:
        observe(model, ((), {}), lambda: model(torch.randn(8, 4)))
    except ZeroDivisionError:
        assert fails
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)


def test_of_two_runs_of_the_same_operators_the_larger_results_count() -> None:
    one = [Observed("nonzero", (3, 2)), Observed("item", 7)]
    other = [Observed("nonzero", (5, 1)), Observed("item", 4)]
    assert most_observed(one, other) == (Observed("nonzero", (5, 2)), Observed("item", 7))
    assert most_observed(one, other[:1]) is None


def selected(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x[mask], x.masked_select(mask[:, :, None]), mask.nonzero()


def test_a_size_without_a_limit_is_at_most_what_its_operator_can_select() -> None:
    graph = make_fx(selected, tracing_mode="symbolic")(torch.randn(4, 9, 16), torch.rand(4, 9) > 0.5).graph
    names = without_limit(graph)
    x = next(node for node in graph.nodes if node.op == "placeholder")
    symbols = [plain_symbol(size) or "" for size in x.meta["val"].shape]
    limits = limits_by_operators(graph, names, dict(zip(symbols, (4, 12, 16), strict=True)))
    assert limits.keys() == names
    assert sorted(limits.values()) == [48, 48 * 16]  # one symbol is of both, the mask of which is the same


def selected_twice(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = x[mask]
    return rows[rows.sum(-1) > 0]


def test_a_mask_of_what_another_mask_selected_is_limited_by_that_one() -> None:
    graph = make_fx(selected_twice, tracing_mode="symbolic")(torch.randn(4, 9, 16), torch.rand(4, 9) > 0.5).graph
    x = next(node for node in graph.nodes if node.op == "placeholder")
    symbols = [plain_symbol(size) or "" for size in x.meta["val"].shape]
    limits = limits_by_operators(graph, without_limit(graph), dict(zip(symbols, (4, 12, 16), strict=True)))
    assert list(limits.values()) == [48, 48]
