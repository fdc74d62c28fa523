"""How a training on several ranks ends and goes on: a rank with too little memory, another budget or another version of
torch, one whose batch becomes too large, one that is killed; and the checkpoint of a killed run on other ranks.

    python -m benchmarks.rank_failures [--ways DDP FSDP2]

A GPT-2 of 100 MB on ranks that are processes of this machine with gloo, each started by itself: nothing but its own
error ends a process. Two times are given: from the beginning of the call that fails to its first error, which is how
long planning takes; and from that error, or from the kill, until no process is left. Runs that go on are compared
with the losses of plain PyTorch on the ranks that the run began with, never interrupted; there is no dropout, whose
random numbers are those of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.ddp import VOCABULARY, gpt2_of
from examples.models.families import integers

RESULT = Path(__file__).parent / "results" / "rank_failures.json"
WAYS = {"DDP": 0.7, "FSDP2": 0.5}
"""The budget in GB of each: more than a step on `TEXTS` takes, and less than one on `LARGE`."""
TOO_LITTLE = {"DDP": 0.45, "FSDP2": 0.25}
"""A budget in GB that no step fits."""
LITTLE, OTHER, VERSION, LARGE_BATCH, KILLED = "too little", "another budget", "another version", "large batch", "killed"
FAULTS = {LITTLE: 0, OTHER: 0, VERSION: 0, LARGE_BATCH: 3, KILLED: 3}
"""Each with the step in which it happens: all ranks are given too little, rank 1 has the others."""
TEXTS, LARGE, LENGTH = 16, 128, 64
GROUP_TIMEOUT_S, LONGEST_S = 60, 400
ERROR = re.compile(r"^(\[rank\d+\]: )?([\w.]+\.)?(?=\w+Error: )")
SAVED_AFTER, STEPS = 2, 5
RESUMED = ((2, 2), (2, 4), (4, 2))
"""Ranks before and after a run is killed."""


@dataclass(frozen=True)
class Run:
    """One training run on several processes, with at most one of `FAULTS`. Losses and checkpoints go to `folder`."""

    way: str
    ranks: int
    folder: str
    fault: str = ""
    planned: bool = True
    resumed: bool = False

    def model(self, rank: int) -> Any:
        """The model under DDP or FSDP2, optimised unless the run is plain."""
        made: Any = gpt2_of(640, 4, 10, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)()
        if self.way == "DDP":
            made = DistributedDataParallel(made)
        else:
            mesh = init_device_mesh("cpu", (self.ranks,))
            for block in made.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(made, mesh=mesh)
        if not self.planned:
            return made
        budget_gb = (TOO_LITTLE if self.fault == LITTLE else WAYS)[self.way]
        if self.fault == OTHER and rank == 1:
            budget_gb *= 1.1
        return memopt.optimize(made, budget_gb, precision="fp32", allow={"recompute", "reinplace"})

    def path(self, name: str, rank: int) -> Path:
        """A file of a rank in the folder."""
        return Path(self.folder) / f"{name}-{rank}"

    def note(self, name: str, rank: int) -> None:
        """Write the time to a file of that name."""
        self.path(name, rank).write_text(str(time.time()))

    def noted(self, name: str) -> list[float]:
        """The times that ranks have noted under that name."""
        return [float(path.read_text()) for path in Path(self.folder).glob(f"{name}-*")]


def on_rank(run: Run, rank: int) -> None:
    """The program of one process."""
    torch.set_num_threads(1)
    meeting = f"file://{run.folder}/meet-{run.ranks}-{run.resumed}"
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=run.ranks, timeout=timeout)
    if run.fault == VERSION and rank == 1:
        torch.__version__ = "2.99.0"  # type: ignore[assignment]
    try:
        train(run, rank)
    except Exception:
        run.note("failed", rank)
        raise
    distributed.barrier()
    os._exit(0)  # the group's destructor may wait for itself


def train(run: Run, rank: int) -> None:
    """Five steps, of which a resumed run takes the last three; a run that is to be killed saves its state before."""
    model = run.model(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step: Any = memopt.TrainStep(model, optimizer, max_grad_norm=None) if run.planned else None
    saved = str(Path(run.folder) / "saved")
    if run.resumed:
        checkpoint.load({"run": memopt.RunState(step)}, checkpoint_id=saved)
    for number in range(SAVED_AFTER if run.resumed else 0, STEPS):
        tokens = integers(VOCABULARY, TEXTS, LENGTH, seed=number % 2)[rank :: run.ranks]
        if number == FAULTS.get(run.fault):
            run.note("began", rank)
            if rank == 1 and run.fault == LARGE_BATCH:
                tokens = integers(VOCABULARY, LARGE, LENGTH)
            if rank == 1 and run.fault == KILLED:
                _kill_within(model, lambda: run.note("failed", rank))
        loss = _step(model, optimizer, step, {"input_ids": tokens, "labels": tokens})
        distributed.all_reduce(loss)
        if rank == 0:
            with run.path("losses", 0).open("a") as file:
                file.write(f"{loss.item() / run.ranks}\n")
        if run.fault == KILLED and number == SAVED_AFTER - 1:
            checkpoint.save({"run": memopt.RunState(step)}, checkpoint_id=saved)


def _step(model: Any, optimizer: torch.optim.Optimizer, step: Any, batch: dict[str, Tensor]) -> Tensor:
    """Train one step by a `TrainStep`, or without one; return its loss."""
    if step is not None:
        return torch.as_tensor(step(batch).loss).detach().clone()
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _kill_within(model: Any, note: Callable[[], None]) -> None:
    """Kill this process in the middle of the model's next forward, after a call of `note`."""

    def kill(*_: Any) -> None:
        note()
        os.kill(os.getpid(), signal.SIGKILL)

    getattr(model, "module", model).transformer.register_forward_hook(kill)


def ended(run: Run) -> dict[str, Any]:
    """Start the processes of a run and wait until all are gone. Returns their exit codes, the errors with which they
    ended, and the time when the last one was gone."""
    command = [sys.executable, "-m", "benchmarks.rank_failures", "--run", json.dumps(asdict(run)), "--rank"]
    logs = [run.path("log", rank) for rank in range(run.ranks)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL, stderr=log.open("w"))
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(LONGEST_S) for process in processes]
    gone = time.time()
    return {"codes": codes, "errors": [_error_in(log) for log in logs], "gone": gone}


def _error_in(log: Path) -> str:
    """The last error in what a process wrote, without the name of its module and that of the rank before it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if ERROR.match(line)]
    return ERROR.sub("", lines[-1]).partition(" This is typically")[0] if lines else ""  # gloo goes on with advice


def failed(way: str, fault: str) -> dict[str, Any]:
    """The row of a run that ends by a fault."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(way, 2, folder, fault)
        found = ended(run)
        first = min(run.noted("failed"))
        planned = first - max(run.noted("began"))
    errors = list(dict.fromkeys(filter(None, found["errors"])))
    seconds = {"until_error_s": planned, "until_gone_s": found["gone"] - first}
    return {"way": way, "fault": fault, "codes": found["codes"], **seconds, "errors": errors}


def resumed(way: str, before: int, after: int) -> dict[str, Any]:
    """The row of a run that is killed and goes on on another number of ranks."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        found = [ended(Run(way, before, folder, KILLED)), ended(Run(way, after, folder, resumed=True))]
        plain = ended(Run(way, before, other, planned=False))
        losses, expected = ([float(line) for line in _read(place)] for place in (folder, other))
    assert found[1]["codes"] == [0] * after
    assert plain["codes"] == [0] * before
    without_break = expected[: FAULTS[KILLED]] + expected[SAVED_AFTER:]
    pairs = list(zip(losses, without_break, strict=True))
    return {
        "way": way,
        "ranks": [before, after],
        "codes": found[0]["codes"],
        "difference": max(abs(one - other) / abs(other) for one, other in pairs),
    }


def _read(folder: str) -> list[str]:
    return (Path(folder) / "losses-0").read_text().splitlines()


def show(faults: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> None:
    table = Table("way", "fault", "exit codes", "error after", "all gone after", "errors")
    for row in faults:
        seconds = (f"{row[name]:.1f} s" for name in ("until_error_s", "until_gone_s"))
        table.add_row(row["way"], row["fault"], str(row["codes"]), *seconds, escape("\n".join(row["errors"])))
    Console().print(table)
    table = Table("way", "ranks before and after", "largest difference of a loss to plain's")
    for row in runs:
        table.add_row(row["way"], str(row["ranks"]), f"{row['difference']:.1e}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        on_rank(Run(**json.loads(given.run)), given.rank)
        return
    faults, runs = [], []
    for way in given.ways:
        faults += [failed(way, fault) for fault in FAULTS]
        runs += [resumed(way, before, after) for before, after in RESUMED]
        write_result(RESULT, {**stamp(), "faults": faults, "resumed": runs})
    show(faults, runs)


if __name__ == "__main__":
    main()
