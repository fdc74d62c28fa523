"""Killed training runs: see `benchmarks.abuse`."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import memopt
from benchmarks.abuse_trial import BAD, Row, make_batch, make_model

STEPS = 20
BUDGET_GB = 0.0037


def train(folder: Path, steps: int = STEPS) -> None:
    """Train from the checkpoint in the folder, if there is one, to the end; write the digest of the parameters."""
    os.environ["MEMOPT_CACHE_DIR"] = str(folder / "cache")
    model = make_model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memopt.optimize(
        model, BUDGET_GB, optimizer=torch.optim.AdamW, precision="fp32", allow={"recompute"}, elsewhere_gb=0
    )
    step = memopt.TrainStep(model, optimizer)
    checkpoint = folder / "checkpoint.pt"
    torch.manual_seed(3)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        step.load_state_dict(state["step"])
    while step.number < steps:
        step(make_batch(4, 64, step.number))
        part = checkpoint.with_suffix(".part")
        torch.save({"model": model.state_dict(), "step": step.state_dict()}, part)
        os.replace(part, checkpoint)  # the checkpoint before is there until the new one is whole
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    (folder / "trained").write_text(digest.hexdigest())


def in_a_child(run: Callable[[], None], kill_after: float | None = None, first: Path | None = None) -> int:
    """Run a function in a fork of this process, which is killed after `kill_after` seconds, counted from when the file
    `first` exists. Returns its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {str(error)[:300]}", flush=True)
            os._exit(1)
    began = time.time()
    end = time.monotonic() + (kill_after if kill_after is not None else 600)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if first is not None:
            if is_newer(first, began) or is_newer(first.with_suffix(".pt"), began):
                end, first = time.monotonic() + (kill_after or 0), None
        elif time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def is_newer(file: Path, seconds: float) -> bool:
    """Whether a file is there and was written after the time `seconds`."""
    try:
        return file.stat().st_mtime > seconds
    except FileNotFoundError:  # or renamed in this moment
        return False


def prepare(row: Row) -> Callable[[int], None]:
    """Train undisturbed for the parameters to compare with; returns a function that tries one seed."""
    folder = Path(tempfile.mkdtemp(prefix="memopt-abuse-"))
    (folder / "whole").mkdir()
    memopt.plan(make_model(layers=1), 1.0, make_batch(4, 64), precision="fp32")  # loads what all children would load
    gc.freeze()  # nor need children look through it for garbage
    begin = time.monotonic()
    assert in_a_child(lambda: train(folder / "whole", STEPS // 2)) == 0
    half = (folder / "whole" / "checkpoint.pt").read_bytes()
    assert in_a_child(lambda: train(folder / "whole")) == 0
    seconds = (time.monotonic() - begin) / 2
    expected = (folder / "whole" / "trained").read_text()
    work = folder / "work"
    work.mkdir()

    def one(seed: int) -> None:
        rng = random.Random(seed)
        for file in work.glob("*.*"):
            file.unlink()
        (work / "trained").unlink(missing_ok=True)
        if rng.random() < 0.5:
            shutil.rmtree(work / "cache", ignore_errors=True)
        if before := rng.random() < 0.5:
            (work / "checkpoint.pt").write_bytes(half)
        kind = rng.choice(("moment", "moment of a step", "byte of a file", "disk full"))
        size = int(2 ** rng.uniform(0, 21))

        def limited() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kind == "byte of a file" else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            train(work)

        if kind == "moment":
            code = in_a_child(lambda: train(work), rng.uniform(0, seconds))
        elif kind == "moment of a step":
            code = in_a_child(lambda: train(work), rng.uniform(0, 1), first=work / "checkpoint.part")
        else:
            code = in_a_child(limited)
        how = {0: "went on", 1: "its checkpoint was refused by the disk"}.get(code, "killed")
        stage = "with a checkpoint" if before or (work / "checkpoint.pt").exists() else "before the first checkpoint"
        if (work / "trained").exists() and code == 0 and (work / "trained").read_text() != expected:
            row.note(seed, f"{BAD}other parameters in the run itself", kind)
        again = in_a_child(lambda: train(work))
        if again != 0 or (work / "trained").read_text() != expected:
            row.note(seed, f"{BAD}the run after it {'failed' if again else 'has other parameters'}", kind)
        else:
            row.note(seed, f"{kind}: {how}, {stage}")
        files = list((work / "cache" / "plans").iterdir())
        most = row.values["figures"]
        most["most_files_in_cache"] = max(len(files), most.get("most_files_in_cache", 0))

    return one
