"""Runs on several ranks in parts: one is saved and killed, the next resumed in processes of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from examples.models.ddp import VOCABULARY, gpt2_of
from examples.models.families import integers
from memopt.run.session import session_of
from tests.integrations.training import Run

STEPS, SAVED_AT, KILLED_AT = 5, 2, 3
TEXTS, LENGTH = 8, 64
gpt2 = gpt2_of(320, 4, 4)
"""7.6 million parameters, 31 MB: more than one bucket of DDP holds."""


@dataclass(frozen=True)
class Part:
    """A part of a run of `STEPS` steps: all of it, until rank 1 is killed, or from where such a part was saved."""

    folder: Path
    budget_gb: float | None
    killed: bool = False
    """Saved after `SAVED_AT` steps, and killed after `KILLED_AT`."""
    resumed: bool = False

    @property
    def first(self) -> int:
        """The number of the first step."""
        return SAVED_AT if self.resumed else 0

    def losses_of(self, rank: int) -> Path:
        """The file for the losses of a rank that is killed."""
        return self.folder / f"losses-{rank}.json"

    @contextmanager
    def step(self, number: int, rank: int, run: Run) -> Iterator[None]:
        """A step with random numbers of its own, whose peak is measured."""
        self.perhaps_killed(number, rank, run.losses)
        torch.manual_seed(100 * rank + number)
        with run.measured():
            yield

    def saves_after(self, number: int) -> bool:
        """Whether the state is saved after a step."""
        return self.killed and number + 1 == SAVED_AT

    def perhaps_killed(self, number: int, rank: int, losses: list[float]) -> None:
        """End rank 1 before the step that it is killed in, once all ranks have noted their losses."""
        if self.killed and number == KILLED_AT:
            self.losses_of(rank).write_text(json.dumps(losses))
            distributed.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, run: Run, model: nn.Module) -> Run:
        """The run with its last weights; those of a killed part are not reached."""
        assert not self.killed
        return run.ended(model)


def buckets_planned(model: nn.Module) -> int:
    """The bytes of DDP's buckets in the plan that the latest step ran by; 0 where it ran plain."""
    call = session_of(model)
    return call.in_use.account.buckets if call is not None and call.in_use is not None else 0


def as_by_torchrun(rank: int) -> None:
    """Set the environment that torchrun gives a process."""
    ranks = str(distributed.get_world_size())
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip


def batch(rank: int, number: int) -> dict[str, Any]:
    """The batch of a rank in a step."""
    tokens: Tensor = integers(VOCABULARY, TEXTS, LENGTH, seed=100 * rank + number)
    return {"input_ids": tokens, "labels": tokens}
