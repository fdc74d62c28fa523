"""Models that take derivatives within their training step: potentials whose forces are a gradient of the energy, and
losses of a model and a batch (a physics-informed network, a gradient penalty, score matching, MAML)."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

grad = torch.autograd.grad


def molecules(atoms: int = 40, edges: int = 200, size: int = 10, seed: int = 0) -> dict[str, Tensor]:
    """A batch of graphs of molecules of about `size` atoms, with energies and forces."""
    draw = torch.Generator().manual_seed(seed)
    sources = torch.randint(0, atoms, (edges,), generator=draw)
    targets = (sources + torch.randint(1, atoms, (edges,), generator=draw)) % atoms
    return {
        "kinds": torch.randint(0, 10, (atoms,), generator=draw),
        "positions": torch.randn(atoms, 3, generator=draw),
        "edges": torch.stack([sources, targets]),
        "molecule": torch.arange(atoms) // size,
        "energies": torch.randn(-(-atoms // size), 1, generator=draw),
        "forces": torch.randn(atoms, 3, generator=draw),
    }


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))


class Potential(nn.Module, ABC):
    """Loss of energies and forces; a subclass computes the atoms' energies."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.width, self.kinds, self.out = width, nn.Embedding(10, width), mlp(width, width, 1)
        self.layers = nn.ModuleList(self.layer() for _ in range(layers))
        self.register_buffer("centers", torch.linspace(0, 3, 8))

    @abstractmethod
    def layer(self) -> nn.Module:
        """One layer between the atoms."""

    @abstractmethod
    def atoms(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        """The energy of each atom."""

    def bases(self, distances: Tensor) -> Tensor:
        return torch.exp(-((distances - self.centers) ** 2))

    def forward(
        self, kinds: Tensor, positions: Tensor, edges: Tensor, molecule: Tensor, energies: Tensor, forces: Tensor
    ) -> Tensor:
        positions.requires_grad_()
        energy = torch.zeros_like(energies).index_add(0, molecule, self.atoms(kinds, positions, edges))
        (gradient,) = grad(energy.sum(), positions, create_graph=True)
        return F.mse_loss(energy, energies) + F.mse_loss(-gradient, forces)


class SchNet(Potential):
    """Continuous filters of distances, summed over neighbours."""

    def layer(self) -> nn.Module:
        return nn.ModuleList([mlp(8, self.width, self.width), mlp(self.width, self.width, self.width)])

    def atoms(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        to, source = edges
        bases = self.bases((positions[to] - positions[source]).norm(dim=-1, keepdim=True))
        hidden = self.kinds(kinds)
        for filters, update in self.layers:  # type: ignore[misc]
            messages = hidden[source] * filters(bases)
            hidden = hidden + update(torch.zeros_like(hidden).index_add(0, to, messages))
        return self.out(hidden)


class PaiNN(Potential):
    """Scalars and vectors of each atom, which messages turn into one another."""

    def layer(self) -> nn.Module:
        n = self.width
        return nn.ModuleList([nn.Linear(8, 3 * n), mlp(n, n, 3 * n), nn.Linear(n, 2 * n), mlp(2 * n, n, 3 * n)])

    def atoms(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        to, source = edges
        difference = positions[source] - positions[to]
        distance = difference.norm(dim=-1, keepdim=True)
        bases, direction = self.bases(distance), difference / distance
        hidden = self.kinds(kinds)
        vectors = hidden.new_zeros(len(kinds), 3, self.width)
        for filters, message, mixing, update in self.layers:  # type: ignore[misc]
            change, old, new = (message(hidden)[source] * filters(bases)).chunk(3, -1)
            hidden = hidden.index_add(0, to, change)
            sent = vectors[source] * old[:, None] + direction[:, :, None] * new[:, None]
            left, right = mixing(vectors.index_add(0, to, sent)).chunk(2, -1)
            norms = right.pow(2).sum(1).add(1e-6).sqrt()
            first, second, third = update(torch.cat([hidden, norms], -1)).chunk(3, -1)
            hidden, vectors = hidden + first + second * (left * right).sum(1), third[:, None] * left
        return self.out(hidden)


class Equivariant(Potential):
    """Sums of spherical tensors up to rank two over neighbours, contracted to invariants by einsum."""

    def layer(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 3 * self.width), nn.Linear(3 * self.width, self.width)])

    def atoms(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        to, source = edges
        difference = positions[to] - positions[source]
        distance = difference.norm(dim=-1, keepdim=True)
        unit = difference / distance
        square = torch.einsum("ea,eb->eab", unit, unit) - torch.eye(3) / 3
        bases, hidden = self.bases(distance), self.kinds(kinds)
        for radial, mixing in self.layers:  # type: ignore[misc]
            hidden = self.block(radial, mixing, hidden, bases, unit, square, edges)
        return self.out(hidden)

    def block(
        self, radial: nn.Module, mixing: nn.Module, hidden: Tensor,
        bases: Tensor, unit: Tensor, square: Tensor, edges: Tensor,
    ) -> Tensor:  # fmt: skip
        to, source = edges
        weights = radial(bases).view(len(unit), -1, 3) * hidden[source][..., None]
        none, one, two = weights.unbind(-1)
        shape = hidden.shape
        scalar = hidden.new_zeros(shape).index_add(0, to, none)
        vector = hidden.new_zeros(*shape, 3).index_add(0, to, torch.einsum("ec,ea->eca", one, unit))
        tensor = hidden.new_zeros(*shape, 3, 3).index_add(0, to, torch.einsum("ec,eab->ecab", two, square))
        products = (
            scalar,
            torch.einsum("nca,nca->nc", vector, vector),
            torch.einsum("nca,ncab,ncb->nc", vector, tensor, vector),
        )
        return hidden + torch.tanh(mixing(torch.cat(products, -1)))


class CheckpointedEquivariant(Equivariant):
    """`Equivariant` with an activation checkpoint around each layer, by hand."""

    def block(self, *args: Any) -> Tensor:  # type: ignore[override]
        return checkpoint(super().block, *args, use_reentrant=False)  # type: ignore[no-any-return]


class DistanceTransformer(Potential):
    """Attention between all atoms, biased by their distances."""

    def layer(self) -> nn.Module:
        return nn.ModuleList([nn.LayerNorm(self.width), nn.Linear(self.width, 3 * self.width), nn.Linear(8, 2)])

    def atoms(self, kinds: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        difference = positions[:, None] - positions[None]
        distances = (difference.pow(2).sum(-1, keepdim=True) + 1e-3).sqrt()
        hidden = self.kinds(kinds)
        for norm, projection, bias in self.layers:  # type: ignore[misc]
            q, k, v = projection(norm(hidden)).view(len(kinds), 2, 3, -1).permute(2, 1, 0, 3).unbind(0)
            mask = bias(self.bases(distances)).permute(2, 0, 1)
            attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])
            hidden = hidden + attended[0].transpose(0, 1).reshape(hidden.shape)
        return self.out(hidden)


class Strained(SchNet):
    """Energies, forces and the stress of a cell: a gradient by a strain of each molecule."""

    def forward(
        self, kinds: Tensor, positions: Tensor, edges: Tensor, molecule: Tensor, energies: Tensor, forces: Tensor
    ) -> Tensor:
        positions.requires_grad_()
        strain = positions.new_zeros(len(energies), 3, 3).requires_grad_()
        symmetric = (strain + strain.mT) / 2
        strained = positions + torch.einsum("na,nab->nb", positions, symmetric[molecule])
        energy = torch.zeros_like(energies).index_add(0, molecule, self.atoms(kinds, strained, edges))
        gradient, stress = grad(energy.sum(), (positions, strain), create_graph=True)
        return F.mse_loss(energy, energies) + F.mse_loss(-gradient, forces) + stress.square().mean()


POTENTIALS = (SchNet, PaiNN, Equivariant, DistanceTransformer, Strained)


def network(inputs: int, outputs: int = 1, width: int = 32, layers: int = 4) -> nn.Sequential:
    """A network of tanh layers."""
    widths = [inputs, *[width] * layers]
    parts = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(width, outputs))


def burgers(model: nn.Module, x: Tensor, t: Tensor, start: Tensor) -> Tensor:
    """The residual of Burgers' equation, of three derivatives, and the distance from a start."""
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(torch.cat([x, t], 1))
    ones = torch.ones_like(u)
    u_x, u_t = grad(u, (x, t), ones, create_graph=True)
    (u_xx,) = grad(u_x, x, ones, create_graph=True)
    return (u_t + u * u_x - 0.01 * u_xx).square().mean() + F.mse_loss(u, start)


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The critic's loss of WGAN-GP."""
    real, made = batch
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_()
    (gradient,) = grad(model(between).sum(), between, create_graph=True)
    return model(made).mean() - model(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


def score_matching(model: nn.Module, batch: Tensor) -> Tensor:
    """Hyvärinen's loss of a score: its divergence and half of its square."""
    jacobians = torch.func.vmap(torch.func.jacrev(model))(batch)
    divergence = jacobians.diagonal(dim1=1, dim2=2).sum(1)
    return (divergence + 0.5 * model(batch).square().sum(1)).mean()


def maml(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss after one inner step."""
    x, y, x_new, y_new = batch
    weights = dict(model.named_parameters())
    loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
    gradients = grad(loss, tuple(weights.values()), create_graph=True)
    adapted = {name: one - 0.1 * by for (name, one), by in zip(weights.items(), gradients, strict=True)}
    return F.mse_loss(torch.func.functional_call(model, adapted, (x_new,)), y_new)


def curvature(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A loss, and its curvature along its own gradient: a Hessian-vector product."""
    x, y = batch
    loss = F.mse_loss(model(x), y)
    gradients = grad(loss, tuple(model.parameters()), create_graph=True)
    directions = [one.detach() for one in gradients]
    products = grad(gradients, tuple(model.parameters()), directions, create_graph=True)
    return loss + 0.01 * sum((a * b).sum() for a, b in zip(products, directions, strict=True))


def adversarial(generator: nn.Module) -> Any:
    """The critic's loss where it calls the generator itself."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, noise = batch
        return penalised(model, (real, generator(noise).detach()))

    return loss


def losses(rows: int) -> dict[str, tuple[Any, nn.Module, Any]]:
    """By name: a loss of a model and a batch, a model for it, and a batch of `rows` rows."""

    def draw(*widths: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(rows, width) for width in widths)

    return {
        "burgers": (burgers, network(2), draw(1, 1, 1)),
        "gradient penalty": (penalised, network(4), draw(4, 4)),
        "two models": (adversarial(network(2, 4)), network(4), draw(4, 2)),
        "score matching": (score_matching, network(3, 3), *draw(3)),
        "maml": (maml, network(1), draw(1, 1, 1, 1)),
        "curvature": (curvature, network(1), draw(1, 1)),
    }
