"""The walk through one `optimize` and one step on the page of the architecture is what happens."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import memopt

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def walk() -> list[tuple[str, str]]:
    """The file and the function of each row of the walk."""
    section = PAGE.read_text(encoding="utf-8").partition("walked through")[2].partition("\n## ")[0]
    return re.findall(r"^\|[^|]*\| `(\S+\.py)` `(\S+)` \|", section, flags=re.MULTILINE)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_each_function_of_the_walk_is_called_in_its_order() -> None:
    torch.manual_seed(0)
    model, x = Blocks().train(), torch.randn(512, 64)
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT / "memopt")):
            qualified = getattr(code, "co_qualname", code.co_name)
            calls.append((Path(code.co_filename).relative_to(ROOT).as_posix(), qualified))

    sys.setprofile(note)
    try:
        memopt.optimize(model, 0.0015, example_inputs=(x,), precision="fp32", elsewhere_gb=None)
        loss = model(x)
        loss.backward()
    finally:
        sys.setprofile(None)
    rows = walk()
    assert len(rows) > 20
    left = iter(calls)
    for row in rows:
        names = {row, (row[0], row[1].rpartition(".")[2])}  # Python 3.10 has no qualified names of code
        assert any(call in names for call in left), f"{row} is not called where the page says it is"
