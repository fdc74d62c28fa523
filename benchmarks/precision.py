"""What 16 bits save, cast and cost in exactness, beside `torch.autocast`: a JSON file and a table.

    python -m benchmarks.precision [--only GPT-2]

Saved bytes and casts: the joint graph of one step at real dimensions, traced on fakes for an H100, fp32 parameters, cut
by torch's own `default_partition` (what the forward hands to the backward, without parameters and inputs); autocast
with CUDA's lists. "weights again": less the 16-bit copies of weights, which the backward can cast again. Casts are all
floating-point casts of forward and backward. Gradient error: all gradients of small models of the same kinds, run for
real on the CPU, as the norm of the difference to float64 over the norm, the median over seeds of the data.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from functorch.compile import default_partition
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memopt
from benchmarks.real_models import BY_NAME as REAL
from benchmarks.stamp import stamp, write_result
from examples.models.families import BY_NAME as SMALL
from examples.models.families import loss_of, without_dropout
from memopt.capture.joint import JointGraph
from memopt.device import hardware
from memopt.levers import precision_rewriting
from memopt.run.session import session_of

RESULT = Path(__file__).parent / "results" / "precision.json"
CARD = "h100"
SEEDS = (1, 2, 3)
MODELS = {
    "GPT-2": ("GPT-2 12L", "gpt2-eager"),
    "Llama": ("Llama 16L", "llama"),
    "BERT": ("BERT", "bert"),
    "ViT": ("ViT-L/16", "vit"),
    "ResNet": ("ResNet-50", "resnet"),
    "T5": ("T5", "t5"),
}


@dataclass(frozen=True)
class Saved:
    """A joint graph's saved bytes in torch's default partition."""

    bytes: int
    weight_copies: int
    """The part of `bytes` that is 16-bit copies of parameters."""
    casts: int


@dataclass(frozen=True)
class Row:
    model: str
    autocast: Saved
    memopt: Saved
    autocast_error: float
    memopt_error: float
    memopt_cpu_error: float
    """`memopt_error` as planned for the CPU, whose autocast has other lists than a card's."""
    autocast_cpu_error: float
    """`autocast_error` under the CPU's own autocast."""


def saved(joint: JointGraph) -> Saved:
    module = copy.deepcopy(joint.module)
    forward, _ = default_partition(module, None, num_fwd_outputs=joint.forward_outputs)
    results: Any = forward.graph.output_node().args[0]
    given = {_storage(node) for node in forward.graph.find_nodes(op="placeholder")}
    sizes: dict[Any, int] = {}
    copies: dict[Any, int] = {}
    for node in results[joint.forward_outputs :]:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or _storage(node) in given:
            continue
        sizes[_storage(node)] = value.untyped_storage().nbytes()
        source = _source(node)
        if source.op == "placeholder" and int(source.name.removeprefix("primals_")) - 1 in joint.parameter_inputs:
            copies[_storage(node)] = sizes[_storage(node)]
    casts = sum(map(_is_cast, joint.module.graph.nodes))
    return Saved(sum(sizes.values()), sum(copies.values()), casts)


def _storage(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _is_cast(node: torch.fx.Node) -> bool:
    if str(node.target) not in ("aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default"):
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return old.is_floating_point() and new.is_floating_point() and old.dtype != new.dtype


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that a value was cast or viewed from."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        viewed = _storage(node.all_input_nodes[0]) == _storage(node)
        if not viewed and not _is_cast(node):
            return node
        (node,) = node.all_input_nodes
    return node


def at_real_dimensions(name: str) -> tuple[Saved, Saved]:
    """Return what is saved under autocast and by memopt, at the real dimensions of a model."""
    found = []
    for precision in ("auto", "bf16"):
        model = REAL[name].make().float()
        batch = {
            key: value.float() if value.is_floating_point() else value for key, value in REAL[name].batch().items()
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "auto"):
            plan = memopt.plan(model, 10_000, batch, optimizer=None, precision=precision, device=CARD)
        assert plan.captured is not None
        (joint,) = plan.captured.regions
        found.append(saved(joint))
    return found[0], found[1]


def gradients(name: str, seed: int, run: Callable[[nn.Module, Any], Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return all gradients of a small model as one vector in float64."""
    model = without_dropout(SMALL[name].make()).to(dtype)
    batch = fresh(SMALL[name].batch("usual"), seed)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    loss_of(run(model, batch)).backward()  # type: ignore[no-untyped-call]
    return torch.cat(
        [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    )


def fresh(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a batch with the same values in another order."""
    generator = torch.Generator().manual_seed(seed)

    def shuffled(values: Tensor) -> Tensor:
        order = torch.randperm(values.numel(), generator=generator)
        return values.flatten()[order].view_as(values)

    return {key: values if "mask" in key else shuffled(values) for key, values in batch.items()}


def plain(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


def under_autocast(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def planned(precision: str, card: str) -> Callable[[nn.Module, Any], Any]:
    """Return a function that runs a model with the precision that memopt plans for a card."""

    def run(model: nn.Module, batch: Any) -> Any:
        memopt.optimize(model, 1000, optimizer=None, precision=precision)
        vars(session_of(model).forward.planner.terms)["rewriting"] = precision_rewriting(precision, hardware(card))  # type: ignore[union-attr]
        return under_autocast(model, batch) if precision == "auto" else plain(model, batch)

    return run


def errors(name: str) -> tuple[float, ...]:
    runs = (planned("auto", CARD), planned("bf16", CARD), planned("bf16", "cpu"), under_autocast)
    found: list[list[float]] = [[] for _ in runs]
    for seed in SEEDS:
        exact = gradients(name, seed, plain, torch.float64)
        for errors, run in zip(found, runs, strict=True):
            errors.append(float((gradients(name, seed, run) - exact).norm() / exact.norm()))
    return tuple(map(median, found))


def measure(model: str) -> Row:
    real, small = MODELS[model]
    return Row(model, *at_real_dimensions(real), *errors(small))


def table(rows: list[Row]) -> Table:
    table = Table(title="bf16 for an H100: memopt / torch.autocast", title_justify="left")
    table.add_column("model")
    for title in ("saved", "weights again", "casts", "gradient error", "on the CPU", "GB saved by autocast"):
        table.add_column(title, justify="right")
    for row in rows:
        ours, theirs = row.memopt, row.autocast
        table.add_row(
            row.model,
            f"{ours.bytes / theirs.bytes:.3f}",
            f"{(ours.bytes - ours.weight_copies) / theirs.bytes:.3f}",
            f"{ours.casts} / {theirs.casts}",
            f"{row.memopt_error:.4f} / {row.autocast_error:.4f} = {row.memopt_error / row.autocast_error:.2f}",
            f"{row.memopt_cpu_error / row.autocast_cpu_error:.2f}",
            f"{theirs.bytes / 1e9:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args().only
    rows = [measure(name) for name in chosen]
    known = json.loads(RESULT.read_text())["models"] if RESULT.exists() else {}
    known |= {row.model: asdict(row) for row in rows}
    write_result(RESULT, {**stamp(), "models": known})
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
