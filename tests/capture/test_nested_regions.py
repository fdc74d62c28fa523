"""Functions under `torch.compiler.nested_compile_region` are planned as the operators in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt


@torch.compiler.nested_compile_region
def bent(layer: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.gelu(layer(x)).sin()


@torch.compiler.nested_compile_region
def twice_bent(layer: nn.Module, x: Tensor) -> Tensor:
    return bent(layer, bent(layer, x))


@torch.compiler.nested_compile_region
def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda x: nn.functional.gelu(layer(x)).sin(), x, use_reentrant=False)
    return result


class Layers(nn.Module):
    """Calls a nested region for each layer."""

    def __init__(self, block: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.layers = block, nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.block(layer, x)
        return x.square().mean()


@pytest.mark.plans_always
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("allow", [{"reinplace"}, {"recompute", "reinplace"}])
@pytest.mark.parametrize("block", [bent, twice_bent, checkpointed])
def test_the_gradients_are_those_of_the_plain_model(
    block: Callable[[nn.Module, Tensor], Tensor], allow: set[str]
) -> None:
    plain, model, x = Layers(block), Layers(block), torch.randn(256, 32)
    expected = plain(x)
    expected.backward()
    budget_gb = 1.0 if allow == {"reinplace"} else 400_000 / 1024**3
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow=allow)
    loss = model(x)
    loss.backward()
    assert torch.equal(loss, expected)
    for parameter, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert same.grad is not None
        assert torch.equal(parameter.grad, same.grad)
    plan = memopt.plan_of(model)
    (scheduled,) = plan.graphs["scheduled"]
    assert torch.ops.higher_order.invoke_subgraph not in {node.target for node in scheduled.graph.nodes}
    assert ("recompute" in allow) == (plan.added_time > 0)
