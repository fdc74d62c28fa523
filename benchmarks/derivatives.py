"""Steps that take derivatives themselves, each plain and planned for five budgets: bits, peaks, predictions.

    python -m benchmarks.derivatives [--only SchNet burgers] [--packages | --largest]

The potentials and losses of `examples/models/derivatives.py`, from the smallest budget that works to the plain step's
peak; fp32, recompute and reinplace, one thread, two steps for each budget. Prints the table of docs/derivatives.md: the
plain peak and the smallest budget, the latter also as a share of the former without parameters, buffers and batch; the
added time there, in how many of the runs losses and gradients are bitwise the plain model's and the peak is within the
budget, and how far predicted peaks lie above measured ones. Batches of changing sizes run by one `optimize` without
example inputs, whose budget lies half-way between the smallest of the first batch and its plain peak. With `--packages`
the models of `benchmarks/derivatives_packages.py` take their place.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.update({"MEMOPT_PLAN": "always", "MEMOPT_CACHE": "0"})

import torch
from torch import Tensor, nn

import memopt
from benchmarks.derivatives_packages import installed
from benchmarks.stamp import stamp
from examples.models.derivatives import POTENTIALS, CheckpointedEquivariant, Equivariant, losses, molecules
from memopt.account.account import distinct_bytes
from memopt.compat.operators import tree_leaves, tree_map
from memopt.errors import GIB

EXACT: dict[str, Any] = {
    "optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0
}  # fmt: skip
BUDGETS = 5
MB = 1024**2
HEAD = ("step", "plain", "smallest", "of activations", "added time", "bitwise", "within budget", "predicted above")


class Trial(NamedTuple):
    """A model, the batches that it trains on, and the loss of both unless the model returns it; with `spread`, the
    loss takes the parts of a batch."""

    model: nn.Module
    batches: tuple[Any, ...]
    loss: Callable[..., Tensor] | None = None
    spread: bool = False


class Run(NamedTuple):
    """A run within a budget: whether it had the plain model's bits, and peaks in bytes."""

    bitwise: bool
    measured: int
    budget: float
    predicted: float


def trials() -> dict[str, Trial]:
    """The models by name."""
    torch.manual_seed(0)
    found = {}
    for kind in POTENTIALS:
        batch = molecules(150, 10) if kind.__name__ == "DistanceTransformer" else molecules(200, 3000)
        found[kind.__name__] = Trial(kind(32, 3), (batch,))
    sizes = tuple(molecules(*size) for size in ((200, 3000), (160, 2200), (230, 3600)))
    found["SchNet, three sizes"] = Trial(POTENTIALS[0](32, 3), sizes)
    for name, (loss, model, batch) in losses(2000).items():
        found[name] = Trial(model, (batch,), loss, spread=name == "burgers")
    return found


def of_packages() -> dict[str, Trial]:
    """The models of the packages that are installed, by name."""
    return {
        name: Trial(model, (batch,), loss, spread=isinstance(batch, tuple))
        for name, (model, batch, loss) in installed()
    }


def fresh(batch: Any) -> Any:
    """A copy of a batch, since forwards make inputs require gradients."""
    return tree_map(lambda value: value.detach().clone(), batch)


def own_bytes(model: nn.Module, batch: Any) -> int:
    """The bytes of a model and a batch."""
    return distinct_bytes([*model.parameters(), *model.buffers(), *tree_leaves(batch)])


def trained(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> tuple[list[Any], int]:
    """The loss of a step and the gradients of weights and inputs, and its peak with model and batch."""
    given = fresh(batch)
    leaves = [*model.parameters(), *tree_leaves(given)]  # as they are: the forward may put others into the batch
    model.zero_grad()
    gc.collect()
    torch.manual_seed(1)
    with memopt.measure_peak("cpu") as peak:
        value = loss(model, given)
        value.backward()  # type: ignore[no-untyped-call]
    return [value.detach(), *(one.grad for one in leaves)], own_bytes(model, batch) + peak.allocated_bytes


def same(ours: list[Any], plain: list[Any]) -> bool:
    """Whether both hold the same bits."""
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, plain, strict=True)
    )  # fmt: skip


def row(name: str, trial: Trial) -> Iterator[str]:
    """The cells of a trial in the table."""

    def plainly(model: nn.Module, batch: Any) -> Tensor:
        if trial.loss is None:
            return model(**batch)  # type: ignore[no-any-return]
        return trial.loss(model, *batch) if trial.spread else trial.loss(model, batch)

    first, options = trial.batches[0], EXACT | ({"loss_fn": trial.loss} if trial.loss else {})
    plain = [trained(copy.deepcopy(trial.model), batch, plainly) for batch in trial.batches]
    most, own = plain[0][1], own_bytes(trial.model, first)
    roomy = memopt.plan(copy.deepcopy(trial.model), 100.0, fresh(first), **options)
    smallest = roomy.smallest_gb() * GIB
    runs, example = [], fresh(first) if len(trial.batches) == 1 else None
    for part in range(BUDGETS) if example is not None else [BUDGETS // 2]:
        budget = smallest + part / (BUDGETS - 1) * (most - smallest)
        ours = memopt.optimize(copy.deepcopy(trial.model), budget / GIB, example_inputs=example, **options)
        for batch, (expected, _) in zip(trial.batches, plain, strict=True):
            for _ in range(2):
                results, peak = trained(ours, batch, memopt.training_loss if trial.loss else plainly)
                predicted = memopt.plan_of(ours).predicted_peak_gb * GIB
                runs.append(Run(same(results, expected), peak, budget, predicted))
    above = [run.predicted / run.measured - 1 for run in runs]
    tight = roomy.at(smallest / GIB)
    yield from (name, f"{most / MB:.1f} MB", f"{smallest / MB:.1f} MB", f"{(smallest - own) / (most - own):.2f}")
    yield f"{tight.added_time:.0%}"
    yield f"{sum(run.bitwise for run in runs)} of {len(runs)}"
    yield f"{sum(run.measured <= run.budget for run in runs)} of {len(runs)}"
    yield f"{min(above):.2%} to {max(above):.2%}"


def print_largest() -> None:
    """Print the most atoms of an equivariant potential of width 128 at 24 GB, by planning alone, and what a checkpoint
    around each of its layers saves of a plain step."""
    for name, allow in (("recompute and reinplace", {"recompute", "reinplace"}), ("nothing recomputed", set[str]())):
        atoms = memopt.max_batch(
            Equivariant(128, 3), 24, lambda atoms: molecules(atoms, 20 * atoms), multiple_of=500, device="rtx-4090",
            backend="aten", **EXACT | {"allow": allow},
        )  # fmt: skip
        print(f"{name}: {atoms} atoms with {20 * atoms} edges")
    plain, by_hand = (bytes_of_an_atom(kind(128, 3)) for kind in (Equivariant, CheckpointedEquivariant))
    print(
        f"bytes of a plain step for an atom, measured: {plain:.0f}, {24 * GIB / plain:.0f} atoms in 24 GB; with a "
        f"checkpoint around each layer: {by_hand:.0f}, {24 * GIB / by_hand:.0f} atoms"
    )


def bytes_of_an_atom(model: nn.Module, atoms: tuple[int, int] = (100, 200)) -> float:
    """The bytes that one more atom adds to the peak of a plain step, from its peaks at two numbers of atoms."""
    peaks = [trained(model, molecules(one, 20 * one), lambda model, batch: model(**batch))[1] for one in atoms]
    return (peaks[1] - peaks[0]) / (atoms[1] - atoms[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of steps")
    parser.add_argument("--largest", action="store_true", help="the most atoms of one at 24 GB instead")
    parser.add_argument("--packages", action="store_true", help="models of packages that are installed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.largest:
        print_largest()
        return
    made = stamp()
    print(f"`{made['command']}`, {made['date']}, {made['machine']['processor']}, torch {made['torch']}\n")
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for name, trial in (of_packages() if arguments.packages else trials()).items():
        if not arguments.only or name in arguments.only:
            print(f"| {' | '.join(row(name, trial))} |", flush=True)


if __name__ == "__main__":
    main()
