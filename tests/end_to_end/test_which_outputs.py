"""Outputs that get gradients: scalars that are no loss, and gradients into outputs beside the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.end_to_end.pieces import GIB, assert_same, check, plan, run
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit

ROWS, WIDTH, CLASSES = 128, 32, 512
EXACT: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}}
SAID = "a gradient flows into an output"


def mlp(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(256, outputs))


def batch() -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)),)


class Contrastive(nn.Module):
    """Features of two sides, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(WIDTH, 16), mlp(WIDTH, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"left": self.left(x), "right": self.right(-x), "logit_scale": self.scale.exp()}

    def loss(self, outputs: Any, x: Tensor, *, only_outputs: bool) -> Tensor:
        scale = 1.0 if only_outputs else outputs["logit_scale"]
        return F.cross_entropy(scale * outputs["left"] @ outputs["right"].T, torch.arange(len(x)))


class Quantised(nn.Module):
    """A vector-quantised autoencoder: reconstruction, indices and commitment loss, in the one or the other order."""

    def __init__(self, *, loss_first: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = mlp(WIDTH, 16), mlp(16, WIDTH), nn.Embedding(32, 16)
        self.loss_first = loss_first

    def quantised(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.cdist(z, self.codes.weight).argmin(-1)
        code = self.codes(chosen)
        return z + (code - z).detach(), chosen, F.mse_loss(z, code.detach()) + F.mse_loss(code, z.detach())

    def forward(self, x: Tensor) -> Any:
        code, chosen, commitment = self.quantised(self.encoder(x))
        output = self.decoder(code)
        return (commitment, output, chosen) if self.loss_first else (output, chosen, commitment)

    def loss(self, outputs: Any, x: Tensor, *, only_outputs: bool) -> Tensor:
        commitment, output = outputs[:2] if self.loss_first else (outputs[2], outputs[0])
        return F.mse_loss(output, x) + (0.0 if only_outputs else commitment)


class Experts(nn.Module):
    """Logits, and a loss that balances the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 10)
        self.experts = nn.ModuleList(mlp(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        mixed = sum(weights[:, number : number + 1] * expert(x) for number, expert in enumerate(self.experts))
        return self.head(x + mixed), weights.mean(0).square().sum()

    def loss(self, outputs: Any, x: Tensor, *, only_outputs: bool) -> Tensor:
        return F.cross_entropy(outputs[0], torch.arange(len(x)) % 10) + (0.0 if only_outputs else 0.1 * outputs[1])


class Variational(nn.Module):
    """A reconstruction, the parameters of a distribution, and its divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.norm = mlp(WIDTH, 16), mlp(8, WIDTH), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, log = self.norm(self.encoder(x)).chunk(2, -1)
        output = self.decoder(mean + torch.randn_like(mean) * (log / 2).exp())
        return output, mean, log, -0.5 * (1 + log - mean**2 - log.exp()).mean()

    def loss(self, outputs: Any, x: Tensor, *, only_outputs: bool) -> Tensor:
        return F.mse_loss(outputs[0], x) + (0.0 if only_outputs else 0.1 * outputs[3])


KINDS: dict[str, Callable[[], Any]] = {
    "a temperature": Contrastive,
    "a commitment loss": lambda: Quantised(loss_first=False),
    "a commitment loss, first": lambda: Quantised(loss_first=True),
    "a balance of experts": Experts,
    "a divergence": Variational,
}


@pytest.mark.filterwarnings(f"error:{SAID}")
@pytest.mark.parametrize("ahead", [False, slow(True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scalar_that_is_no_loss(kind: str, ahead: bool) -> None:
    """Outputs that the loss is computed from change from one step to the next, and within an accumulation."""
    torch.manual_seed(0)
    model, inputs = KINDS[kind](), batch()

    def piece(model: Any) -> list[Tensor]:
        found = []
        for only_outputs in (True, False, False, True):
            value = model.loss(model(*inputs), inputs[0], only_outputs=only_outputs)
            value.backward()
            found.append(value.detach())
        return found

    roomy = plan(model, inputs)
    extra = 5 * ROWS * (ROWS + WIDTH) * 4 / GIB + 2 * roomy.account.gradients / GIB  # the loss's own, and gradients
    options = {"example_inputs": inputs} if ahead else {}
    check(model, piece, (roomy.smallest_gb() + roomy.plain_peak_gb) / 2 + extra, inputs, **options)


class Model(nn.Module):
    """A loss and logits: large ones are deferred, small ones are returned."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.body, self.head = nn.BatchNorm1d(WIDTH), mlp(WIDTH, WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.dropout(self.body(self.norm(x)), 0.5))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64)), logits


def both(loss: Tensor, logits: Tensor) -> Tensor:
    return loss + logits.square().mean()


def only_logits(loss: Tensor, logits: Tensor) -> Tensor:
    return logits.square().mean()


def only_loss(loss: Tensor, logits: Tensor) -> Tensor:
    return loss


@pytest.mark.parametrize("classes", [CLASSES, 10])
@pytest.mark.parametrize("ahead", [False, slow(True)])
@pytest.mark.parametrize("first", [both, only_logits])
def test_gradients_into_other_outputs(first: Callable[..., Tensor], ahead: bool, classes: int) -> None:
    """The first such step ends beside the plan, later ones run by a plan for all outputs; the caller holds the outputs
    of one step until the next one has begun."""
    inputs = batch()
    model = Model(classes)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT, **({"example_inputs": inputs} if ahead else {}))

    def piece(model: nn.Module) -> list[Tensor]:
        found = []
        for use in (only_loss, first, both, only_logits, only_loss):
            outputs = model(*inputs)
            value = use(*outputs)
            value.backward()
            found.append(value.detach())
        return found

    expected = run(plain, piece, inputs)
    with pytest.warns(UserWarning, match=rf"{SAID} of shape \(128, {classes}\).*outputs='all'") as said:
        found = run(model, piece, inputs)
    assert sum(SAID in str(one.message) for one in said) == 1
    for ours, theirs in zip(found.returned, expected.returned, strict=True):
        assert torch.equal(ours, theirs)
    for name, buffer in expected.buffers.items():
        assert torch.equal(found.buffers[name], buffer), name
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-5, atol=1e-7)
    if first is only_logits:  # nothing was summed in another order
        model.zero_grad()
        plain.zero_grad()
        assert_same(run(model, piece, inputs), run(plain, piece, inputs))


def optimized(**options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    model = Model()
    memopt.optimize(model, 1.0, **{**EXACT, **options})
    return model, *model(*batch())


@pytest.mark.filterwarnings(f"ignore:{SAID}")
def test_the_forward_may_be_left_as_it_is_by_many_backwards() -> None:
    model, loss, logits = optimized()
    first = torch.autograd.grad(both(loss, logits), list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(both(loss, logits), list(model.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, second))
    assert all(parameter.grad is None for parameter in model.parameters())
    only_logits(loss, logits).backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.filterwarnings(f"ignore:{SAID}")
def test_a_gradient_of_the_input() -> None:
    (x,) = batch()
    model = Model()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    gradients = []
    for one in (model, plain):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        only_logits(*one(2 * given)).backward()
        gradients.append(given.grad)
    assert torch.equal(*gradients)


def test_weights_that_have_changed_are_refused() -> None:
    model, loss, logits = optimized()
    value = only_logits(loss, logits)
    torch.optim.SGD(model.parameters(), 0.1).step()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(memopt.UnplannedGradientError, match=r"weights or inputs have changed.*outputs='all'"):
        value.backward()


def test_after_the_backward_it_is_too_late() -> None:
    _, loss, logits = optimized()
    value = only_logits(loss, logits)
    loss.backward()
    with pytest.raises(memopt.UnplannedGradientError, match="without retain_graph=True"):
        value.backward()


class Large(Model):
    """Writes to a buffer of which no copy is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1024, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen[: len(x)] += x
        return super().forward(x)


def test_where_no_second_forward_is_possible() -> None:
    model = Large()
    memopt.optimize(model, 1.0, **EXACT)
    loss, logits = model(*batch())
    with pytest.raises(memopt.UnplannedGradientError, match=r"writes to a large buffer.*outputs='all'"):
        both(loss, logits).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_gradients_are_refused() -> None:
    model, loss, logits = optimized()
    with pytest.raises(memopt.UnplannedGradientError, match="create_graph=True"):
        torch.autograd.grad(only_logits(loss, logits), list(model.parameters()), create_graph=True)
