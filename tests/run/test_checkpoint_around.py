"""A planned model that the loop calls within `torch.utils.checkpoint`, whose hooks pack what the model saves."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.run.recorder import Recorder

pytestmark = pytest.mark.plans_always


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_checkpoint_around_a_planned_model(reentrant: bool, breaks: bool, recwarn: pytest.WarningsRecorder) -> None:
    class Block(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self[1](torch.tanh(self[0](x)))
            if breaks:
                torch._dynamo.graph_break()
            return self[3](self[2](hidden))

    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Block(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))
        if planned:
            memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        x = torch.randn(40, 8, requires_grad=True)
        for _ in range(3):
            optimizer.zero_grad()
            if planned or reentrant:
                loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
            else:  # as a planned call runs: once, so that the statistics move once a step
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            results.append([loss.detach(), *(one.grad for one in model.parameters()), *model.buffers(), torch.rand(1)])
            results[-1] = [one.clone() for one in results[-1]]
    assert all(torch.equal(*pair) for one in range(3) for pair in zip(results[one], results[3 + one], strict=True))
    assert sum("written once a step" in str(one.message) for one in recwarn) == (not reentrant)


def test_a_checkpoint_that_ends_its_second_run_early_is_no_error_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would try to capture code that it has passed over again in each step."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute"})
    forgotten: list[Recorder] = []
    monkeypatch.setattr(Recorder, "forget_errors", forgotten.append)
    for _ in range(2):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert not forgotten


def test_hooks_of_the_caller_that_get_what_a_plan_saves_are_named() -> None:
    """Hooks that save in lower precision change other values than in the plain loop, which nothing said."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float)
    words = "saved_tensors_hooks get the tensors that the plan of Sequential saves"
    with pytest.warns(UserWarning, match=words), hooks:
        loss = model(torch.randn(40, 8)).square().mean()
    loss.backward()


def test_torchs_own_hooks_need_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    with torch.autograd.graph.save_on_cpu():
        loss = model(torch.randn(40, 8)).square().mean()
    loss.backward()
    assert not [one for one in recwarn if "saved_tensors_hooks" in str(one.message)]
