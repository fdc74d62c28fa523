"""A public training program: where its model comes from, and how a driver gets at it without running its scripts."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

CHECKOUTS = Path(os.environ.get("PUBLIC_PROGRAMS", "/tmp/public"))
"""The folder with a checkout of each repository, under its name without the owner; `site` in it has packages that the
programs import and memopt does not."""


class Optimize(Protocol):
    """The one line of memopt in a program, or nothing at all where it runs plain."""

    def __call__(self, model: Any, **options: Any) -> Any: ...


Log = Callable[..., None]
"""Called with the losses at the end of each step, where the gradients are still there."""


@dataclass(frozen=True)
class Program:
    """A public program and its driver: the statements of its loop around the model class of the checkout.

    The names of the last six fields are those of `tests.loops.loop.Loop`, whose runner runs both."""

    train: Callable[[Optimize, Log], None]
    repository: str
    """Owner and name on GitHub, or the name of a package."""
    commit: str
    """The commit that was tried, or the version of the package."""
    file: str
    """The path of the model's file in the repository."""
    needs: tuple[str, ...] = ()
    """Packages that have to be installed."""
    rounding: str = ""
    loss_tolerance: float = 0.05
    way_tolerance: float = 0.5
    unforeseen: str = ""

    @property
    def name(self) -> str:
        return self.train.__name__

    @property
    def title(self) -> str:
        return f"{self.repository}@{self.commit[:7]} {self.file}"


def imported(repository: str, module: str, *, within: str = "") -> Any:
    """Import a module of a checkout; `within` is the folder that its own imports start from."""
    _at_front(CHECKOUTS / repository / within)
    return importlib.import_module(module)


def package(name: str) -> Any:
    """Import a package that was installed for the programs. torchvision's operators are defined in Python first: its
    compiled ones need the torch that it was built for."""
    if str(CHECKOUTS / "site") not in sys.path:
        sys.path.append(str(CHECKOUTS / "site"))
        _define_vision_operators()
    return importlib.import_module(name)


def definitions(repository: str, file: str, **given: Any) -> ModuleType:
    """Run the imports, classes and functions of a script, and none of its other statements. `given` has the names that
    these leave undefined. Imports of what is not installed are left out."""
    path = CHECKOUTS / repository / file
    _at_front(path.parent)
    package("torchvision")
    module = sys.modules[f"{path.stem}_definitions"] = ModuleType(f"{path.stem}_definitions")
    module.__dict__.update(given, __file__=str(path))
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)):
            code = compile(ast.Module([statement], []), str(path), "exec")
            try:
                exec(code, module.__dict__)
            except ImportError:
                continue
    return module


def batches(*tensors: Tensor, size: int) -> DataLoader[Any]:
    """Shuffled batches of examples, the last one smaller."""
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=True)


def epochs(loader: DataLoader[Any], steps: int) -> Iterator[Any]:
    """Batches of one epoch after the other, until there were `steps`."""
    done = 0
    while True:
        for batch in loader:
            yield batch
            if (done := done + 1) == steps:
                return


def _at_front(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _define_vision_operators() -> None:
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.impl("nms", _suppressed, "CPU")
    importlib.import_module("torchvision.ops.boxes")._assert_has_ops = lambda: None
    align = sys.modules["torchvision.ops.roi_align"]
    align._roi_align = align._roi_align.__wrapped__  # not compiled by inductor


_LIBRARY = torch.library.Library("torchvision", "DEF")
"""Kept, since operators go with the library that defines them."""


def _suppressed(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The indices of boxes, shape (n, 4), that no better box overlaps by more than `iou_threshold`; the best first."""
    order, kept = scores.argsort(descending=True, stable=True), []
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[order, :2], boxes[best, :2])
        high = torch.minimum(boxes[order, 2:], boxes[best, 2:])
        overlap = (high - low).clamp(min=0).prod(1)
        order = order[overlap <= iou_threshold * (areas[order] + areas[best] - overlap)]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)
