"""The log has two lines for each set of shapes that is planned, before and after, with its seconds, and no other."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.run.status import shapes_of
from tests.run.pieces import Blocks

pytestmark = pytest.mark.plans_always  # the plain steps would fit


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not re.search(r" took [\d.]+ s$", line := record.getMessage()):  # stages of a second or more
                found.append(line)

    logger, handler = logging.getLogger("memopt"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


def train(model: nn.Module, rows: int, *, accumulate: int = 1) -> None:
    model.zero_grad()
    for _ in range(accumulate):
        model(torch.ones(rows, 32)).backward()


@pytest.mark.parametrize("ahead", [False, True])
def test_two_lines_for_each_set_of_shapes(lines: list[str], ahead: bool) -> None:
    model = Blocks().train()
    given = {"example_inputs": (torch.ones(8, 32),)} if ahead else {}
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"}, **given)
    assert len(lines) == 2 * ahead
    for rows in (8, 8, 4, 8, 4):
        train(model, rows, accumulate=2)
    for begins, ends, rows in zip(lines[::2], lines[1::2], (8, 4), strict=True):
        assert begins == f"planning Blocks for ({rows}, 32), which takes some seconds"
        assert re.match(rf"planned Blocks in .*s for \({rows}, 32\): peak .* of .*, added time 0.0%$", ends)


@pytest.mark.parametrize("heard", [False, True])
def test_new_shapes_in_training_are_told_where_nobody_listens_to_the_log(
    heard: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("memopt")
    logger.setLevel(logging.WARNING if heard else logging.NOTSET)
    try:
        model = Blocks().train()
        given = (torch.ones(8, 32),)
        memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"}, example_inputs=given)
        for rows in (8, 8, 4, 8, 4):
            train(model, rows, accumulate=2)
    finally:
        logger.setLevel(logging.NOTSET)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("memopt: plann")]
    assert [line.partition(" in ")[0] for line in lines] == [
        "memopt: planning Blocks for (4, 32), which takes some seconds",
        "memopt: planned Blocks",
    ] * (not heard)


def test_shapes_are_named_by_keywords_and_found_in_containers() -> None:
    pair = [torch.ones(2), {"mask": torch.ones(3, 1)}]
    assert shapes_of(((torch.ones(4), 3), {"pair": pair, "flag": True})) == "(4,), pair (2,), pair (3, 1)"
    assert shapes_of(((), {})) == "no tensors"


def test_shapes_in_objects_are_named_by_their_attributes() -> None:
    batch = SimpleNamespace(ids=torch.ones(2, 3, dtype=torch.long), name="first", mask=torch.ones(2))
    assert shapes_of(((batch,), {})) == "SimpleNamespace.ids (2, 3), SimpleNamespace.mask (2,)"
    assert shapes_of(((), {"batch": batch})) == "batch.ids (2, 3), batch.mask (2,)"
