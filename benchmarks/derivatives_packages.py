"""Small models of packages whose steps take derivatives, as rows for `python -m benchmarks.derivatives --packages`.

Those that are installed: mace-torch, schnetpack, torchmd-net, deepxde (none is among memopt's own requirements; the
versions 0.3.16, 2.1.1, 3.1.0 and 1.15.0 were used). Each is the package's own model with its own forces or derivatives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models.derivatives import molecules

Found = tuple[nn.Module, Any, Callable[..., Tensor]]
"""A model, a batch, and the loss of both."""


def installed() -> Iterator[tuple[str, Found]]:
    """The models of the packages that are installed, by name."""
    for name, make in MODELS.items():
        with suppress(ModuleNotFoundError):
            torch.manual_seed(0)
            yield name, make()


def mace(layers: int = 2) -> Found:
    """MACE of correlation two, with its forces."""
    from e3nn import o3
    from mace import modules

    blocks = modules.interaction_classes
    model = modules.ScaleShiftMACE(
        r_max=4.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, num_interactions=layers, num_elements=10,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
        hidden_irreps=o3.Irreps("32x0e + 32x1o"), MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=torch.zeros(10).numpy(),
        avg_num_neighbors=8, atomic_numbers=list(range(1, 11)), correlation=2, gate=F.silu,
        atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip
    given = molecules(80, 800)
    count = len(given["energies"])
    batch = {
        "positions": given["positions"], "edge_index": given["edges"], "batch": given["molecule"],
        "node_attrs": F.one_hot(given["kinds"], 10).float(), "energy": given["energies"][:, 0],
        "forces": given["forces"], "shifts": torch.zeros(800, 3), "unit_shifts": torch.zeros(800, 3),
        "cell": torch.zeros(3 * count, 3), "ptr": torch.arange(0, 81, 10), "head": torch.zeros(count, dtype=torch.long),
    }  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["positions"].requires_grad_()  # MACE itself does it only where it is not compiled
        found = model(batch, training=True, compute_force=True)
        return F.mse_loss(found["energy"], batch["energy"]) + F.mse_loss(found["forces"], batch["forces"])

    return model.float(), batch, loss


def schnetpack(kind: str, *, stress: bool = False) -> Found:
    """A potential of schnetpack with its module for forces."""
    from torch.utils.data import dataloader

    if not hasattr(dataloader, "T_co"):
        dataloader.T_co = TypeVar("T_co", covariant=True)  # type: ignore[attr-defined] # which it takes from torch < 2.13
    import schnetpack as package

    atomistic, names = package.atomistic, package.properties
    model = package.model.NeuralNetworkPotential(
        representation=getattr(package.representation, kind)(
            n_atom_basis=32, n_interactions=3, radial_basis=package.nn.GaussianRBF(n_rbf=8, cutoff=5.0),
            cutoff_fn=package.nn.CosineCutoff(5.0),
        ),
        input_modules=[*[atomistic.Strain()] * stress, atomistic.PairwiseDistances()],
        output_modules=[
            atomistic.Atomwise(n_in=32, output_key="energy"),
            atomistic.Forces(energy_key="energy", force_key="forces", calc_stress=stress),
        ],
    )  # fmt: skip
    given = molecules(200, 3000)
    count = len(given["energies"])
    batch = {
        names.Z: given["kinds"], names.R: given["positions"], names.idx_i: given["edges"][0],
        names.idx_j: given["edges"][1], names.offsets: torch.zeros(3000, 3), names.idx_m: given["molecule"],
        names.n_atoms: torch.full((count,), 10), names.cell: torch.eye(3).repeat(count, 1, 1),
    }  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(batch)
        return sum(
            (found[name].square().mean() for name in ("energy", "forces", "stress")[: 2 + stress]), torch.zeros(())
        )

    return model.train(), batch, loss


def tensornet() -> Found:
    """TensorNet of torchmd-net, whose operators are kernels of its own."""
    from torchmdnet.models.model import create_model

    model = create_model(
        {
            "model": "tensornet", "embedding_dimension": 32, "num_layers": 2, "num_rbf": 8, "rbf_type": "expnorm",
            "trainable_rbf": False, "activation": "silu", "cutoff_lower": 0.0, "cutoff_upper": 5.0, "max_z": 11,
            "max_num_neighbors": 32, "derivative": True, "output_model": "Scalar", "prior_model": None, "precision": 32,
            "reduce_op": "sum", "equivariance_invariance_group": "O(3)", "atom_filter": -1, "box_vecs": None,
            "check_errors": True, "static_shapes": False, "vector_cutoff": False, "remove_ref_energy": False,
        }
    )  # fmt: skip
    given = molecules(80)
    batch = (given["kinds"], given["positions"], given["molecule"], given["energies"], given["forces"])

    def loss(
        model: nn.Module, kinds: Tensor, positions: Tensor, molecule: Tensor, energies: Tensor, forces: Tensor
    ) -> Tensor:
        energy, found = model(kinds, positions, molecule, num_systems=len(energies))
        return F.mse_loss(energy, energies) + F.mse_loss(found, forces)

    return model.train(), batch, loss


def burgers() -> Found:
    """Burgers' equation as deepxde's examples have it, its Jacobian and Hessian."""
    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde

    deepxde.config.set_default_float("float32")
    torch.set_default_device("cpu")

    def loss(model: nn.Module, x: Tensor, start: Tensor) -> Tensor:
        u = model(x.requires_grad_())
        deepxde.grad.clear()
        u_x, u_t = (deepxde.grad.jacobian(u, x, j=dimension) for dimension in (0, 1))
        residual = u_t + u * u_x - 0.01 * deepxde.grad.hessian(u, x, i=0, j=0)
        return residual.square().mean() + F.mse_loss(u[: len(start)], start)

    net = deepxde.nn.FNN([2] + [32] * 4 + [1], "tanh", "Glorot normal")
    return net.train(), (torch.rand(2000, 2), torch.zeros(200, 1)), loss


MODELS: dict[str, Callable[[], Found]] = {
    "MACE (mace-torch)": mace,
    "MACE, four layers (mace-torch)": partial(mace, 4),
    "SchNet (schnetpack)": lambda: schnetpack("SchNet"),
    "PaiNN with stress (schnetpack)": lambda: schnetpack("PaiNN", stress=True),
    "TensorNet (torchmd-net)": tensornet,
    "Burgers (deepxde)": burgers,
}
