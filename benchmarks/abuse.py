"""Kept plans, plan files, caches and checkpoints under abuse: nothing may be corrupt, lost or growing.

    python -m benchmarks.abuse [mutations kills shapes] [--until 2000] [--limit-minutes 30]

Goes on where it stopped: each part runs the seeds from the number in its row of the result file up to `--until`.

- mutations: a kept plan (and a plan in a file of its own) with other bytes, cut off, with other values in its fields,
  of another budget, with a right digest or a wrong one; then one planned step beside the plain one.
- kills: a training run with checkpoints that is killed at a random moment, or at a random byte of a file that it
  writes, or that finds the disk full; then a process that goes on from its files, whose parameters are compared with
  those of a run that nothing disturbed.
- shapes: steps with changing batches and lengths, planned beside plain.

The model is transformers' GPT-2 with 2 layers of width 64 (one for the kills) and dropout, in fp32, on the CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import memopt
from benchmarks import abuse_files, abuse_kills
from benchmarks.abuse_trial import BAD, Row, equal, make_batch, make_model

MIB = 2**20
UNTIL = {"mutations": 2000, "kills": 200, "shapes": 2000}


def shapes(row: Row) -> Callable[[int], None]:
    """Make a model and its planned copy; returns a function that trains both by one seed and notes the outcome."""
    folder = Path(tempfile.mkdtemp(prefix="memopt-abuse-"))
    os.environ["MEMOPT_CACHE_DIR"] = str(folder)
    plain, model = make_model(), make_model()
    largest = memopt.plan(model, 1.0, make_batch(4, 64), precision="fp32", elsewhere_gb=0)
    budget_gb = (largest.smallest_gb() + largest.plain_peak_gb) / 2
    memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, elsewhere_gb=0)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (plain, model)]
    growth: list[dict[str, float]] = row.values["figures"].setdefault("growth", [])

    def one(seed: int) -> None:
        rng = random.Random(seed)
        length = 8 * rng.randint(1, 8) if rng.random() < 0.7 else rng.randint(2, 64)
        batch = make_batch(rng.randint(1, 4), length, seed)
        losses = []
        for trained, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(seed)
            loss = trained(**batch).loss
            loss.backward()
            losses.append(loss.detach())
            if seed % 4 == 3:  # four calls make a step
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        # A step that fits runs plain, and asking for its plan makes one: this is done for every tenth.
        plan = memopt.plan_of(model) if seed % 10 == 0 else None
        if not torch.equal(*losses) or (seed % 50 == 0 and not equal(plain.parameters(), model.parameters())):
            row.note(seed, f"{BAD}other numbers", str(losses))
        elif plan is not None and plan.predicted_peak_bytes > plan.budget_bytes:
            row.note(seed, f"{BAD}over the budget", str(plan.predicted_peak_gb))
        else:
            row.note(seed, "equal to plain" + (", recomputes" if plan is not None and plan.added_seconds else ""))
        if (seed + 1) % 100 == 0:
            files = list((folder / "plans").iterdir())
            growth.append({
                "step": seed + 1, "resident_mb": resident_bytes() / MIB, "plan_files": len(files),
                "plan_mb": sum(file.stat().st_size for file in files) / MIB,
            })  # fmt: skip

    return one


def resident_bytes() -> int:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PARTS: dict[str, Callable[[Row], Callable[[int], None]]] = {
    "mutations": abuse_files.prepare, "kills": abuse_kills.prepare, "shapes": shapes
}  # fmt: skip


def run(part: str, until: int, limit_seconds: float) -> None:
    """Run a part from its first seed that has not run, up to `until`, for at most `limit_seconds`."""
    row, begin = Row(part), time.perf_counter()
    done = row.values["seeds"]
    one = PARTS[part](row)
    while done < until and time.perf_counter() - begin < limit_seconds:
        one(done)
        done += 1
        if done % 50 == 0:
            row.save(done)
    row.save(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*UNTIL, []], default=[])
    parser.add_argument("--until", type=int)
    parser.add_argument("--limit-minutes", type=float, default=600.0)
    given = parser.parse_args()
    os.environ["MEMOPT_CACHE"] = "1"
    torch.set_num_threads(1)
    for part in given.parts or UNTIL:
        run(part, given.until or UNTIL[part], 60 * given.limit_minutes)


if __name__ == "__main__":
    main()
