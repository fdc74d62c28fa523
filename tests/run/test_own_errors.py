"""What the plain model's forward raises comes through as it is, and later calls are planned as before."""

import pytest
import torch
from torch import Tensor, nn

import memopt

pytestmark = pytest.mark.plans_always


class Checked(nn.Module):
    """Refuses batches of other features in one of several ways, and counts its calls."""

    def __init__(self, check: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.check, self.calls = nn.Linear(8, 16), nn.BatchNorm1d(16), check, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.check == "sizes" and x.shape[1] != 8:
            raise ValueError("eight features")
        if self.check == "values" and x.isnan().any():
            raise FloatingPointError("not a number")
        return self.norm(self.body(x)).square().sum()


@pytest.mark.parametrize(
    ("check", "expected"), [("none", RuntimeError), ("sizes", ValueError), ("values", FloatingPointError)]
)
@pytest.mark.parametrize("allow", [{"recompute"}, {"recompute", "plain"}], ids=["", "plain"])
@pytest.mark.parametrize("first", [0, 2])
def test_the_models_own_error(check: str, expected: type[Exception], allow: set[str], first: int) -> None:
    wrong = torch.full((4, 8), torch.nan) if check == "values" else torch.randn(4, 9)
    results = []
    for planned in (False, True):
        model = Checked(check)
        if planned:
            memopt.optimize(model, 1, optimizer=None, precision="fp32", allow=allow)
        torch.manual_seed(1)
        for step in range(4):
            if step == first:
                with pytest.raises(expected):
                    model(wrong)
            model(torch.randn(4, 8)).backward()
        results.append([*(one.grad for one in model.parameters()), *model.buffers()])
        if planned:
            assert "planned" in str(memopt.status(model))
            assert "unplanned" not in str(memopt.status(model))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
