"""Runs a function on two or more ranks: processes that exchange tensors by gloo."""

from __future__ import annotations

import multiprocessing as processes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

processes.set_forkserver_preload(["memopt.api", "torch._dynamo", "torch.distributed", "transformers"])


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function(rank, *arguments)` on each rank. It is a function of a module, and its results can be
    saved."""
    return on_ranks(2, function, *arguments)


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `on_two_ranks`, on as many ranks as are asked for."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked from a process that has imported torch and memopt once for all tests: seconds for each rank.
        given = ranks, folder, dict(os.environ), function, arguments
        multiprocessing.start_processes(_run, given, nprocs=ranks, start_method="forkserver")
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(ranks)]


def _run(
    rank: int,
    ranks: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.save(function(rank, *arguments), Path(folder) / str(rank))
    distributed.barrier()
    # No teardown: the group's destructor joins gloo's thread while it holds the GIL that this thread may wait for.
    os._exit(0)


def ended(act: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of the error with which an act ends; "" where it does not. A rank that waits for one that does
    not come ends with gloo's error, after half an hour."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def check_refused_together(ranks: list[list[tuple[str, str]]]) -> None:
    """Check three calls of two ranks, of which the second is too large for rank 1: as kinds and texts of their errors
    ("" where a step is taken)."""
    for taken, (kind, text), later in ranks:
        assert taken == later == ("", "")
        assert kind == "BudgetError"
        assert text == ranks[0][1][1]
        assert text.endswith("this is the error on rank 1, and all ranks stop")
