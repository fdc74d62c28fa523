"""Steps with changing shapes: see `benchmarks.abuse`."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import memopt
from benchmarks.abuse import BAD, Row, equal, make_batch, make_model

MIB = 2**20


def prepare(row: Row) -> Callable[[int], None]:
    """A model and its planned copy, trained in step by AdamW; returns what runs one step of each."""
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
