"""Two ranks under FSDP2 train alike or stop together: before a forward gathers anything, all go on or none does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from examples.models.ddp import VOCABULARY, fingerprint, gpt2_of
from examples.models.families import integers
from memopt.compat.tensors import shard_of
from tests.two_ranks import check_refused_together, ended, on_two_ranks

pytestmark = pytest.mark.slow  # each case plans on two ranks
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
ROOMY_GB = 1.0
make = gpt2_of(64, 2, 4)


def batch(rank: int, number: int, length: int = 32, texts: int = 2) -> dict[str, torch.Tensor]:
    tokens = integers(VOCABULARY, texts, length, seed=100 * rank + number)
    return {"input_ids": tokens, "labels": tokens}


def sharded(*, blocks: bool = True) -> Any:
    torch.manual_seed(0)
    model: Any = make()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h if blocks else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(budget_gb: float = ROOMY_GB, *, blocks: bool = True, **options: Any) -> Any:
    return memopt.optimize(sharded(blocks=blocks), budget_gb, **{**EXACT, **options})


def step_of(model: Any, given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    return lambda: model(**given).loss.backward()


def other_version(rank: int) -> Any:
    before = torch.__version__
    if rank:
        torch.__version__ = "2.99.0"  # type: ignore[assignment]
    try:
        return ended(step_of(wrapped(), batch(rank, 0)))
    finally:
        torch.__version__ = before


def one_does_not_fit(rank: int) -> Any:
    """A step that fits on both, one whose batch is too large for rank 1, and a step after that."""
    model = wrapped(0.05)
    texts = (2, 256 if rank else 2, 2)
    return [ended(step_of(model, batch(rank, number, texts=count))) for number, count in enumerate(texts)]


TERMS: dict[str, tuple[Callable[[int], Any], str]] = {
    "budget": (
        lambda rank: ended(step_of(wrapped(1.0 + rank), batch(rank, 0))),
        "the budget is 1 GB on rank 0, 2 GB on rank 1",
    ),
    "levers": (
        lambda rank: ended(step_of(wrapped(allow={"recompute"} if rank else EXACT["allow"]), batch(rank, 0))),
        "allow is recompute, reinplace on rank 0, recompute on rank 1",
    ),
    "version": (other_version, "torch is 2.13.0+cpu on rank 0, 2.99.0 on rank 1"),
    "sharding": (
        lambda rank: ended(step_of(wrapped(blocks=not rank), batch(rank, 0))),
        "the sharding is 3 groups",
    ),
}


def refusals(rank: int) -> dict[str, Any]:
    found = {name: case(rank) for name, (case, _) in TERMS.items()}
    found["too large"] = one_does_not_fit(rank)
    found["ahead"] = ended(lambda: wrapped(0.05, example_inputs=batch(rank, 0, texts=256 if rank else 2)))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_two_ranks(refusals)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TERMS)
def test_other_terms_are_named_on_every_rank(ranks: list[dict[str, Any]], name: str) -> None:
    kind, text = ranks[0][name]
    assert kind == "ValueError"
    assert TERMS[name][1] in text
    assert ranks[1][name] == (kind, text)


@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_cannot_fit_stops_all_and_a_later_step_is_taken(ranks: list[dict[str, Any]]) -> None:
    check_refused_together([rank["too large"] for rank in ranks])


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_ahead_of_training_is_that_of_all(ranks: list[dict[str, Any]]) -> None:
    kind, text = ranks[0]["ahead"]
    assert kind == "BudgetError"
    assert "on rank 1, and all ranks stop" in text
    assert ranks[1]["ahead"] == (kind, text)


def lengths_apart(rank: int) -> list[list[list[str]]]:
    """Fingerprints of the losses and gradients of four steps, plain and planned, in which the ranks meet new lengths at
    different times: then one of them captures and the other does not."""
    lengths = ((16, 32, 16, 48), (16, 16, 48, 64))[rank]
    runs = []
    for model in (sharded(), wrapped()):
        found = []
        for number, length in enumerate(lengths):
            torch.manual_seed(number)
            loss = model(**batch(rank, number, length)).loss
            loss.backward()
            found.append([fingerprint(loss), *(fingerprint(shard_of(value.grad)) for value in model.parameters())])
            model.zero_grad()
        runs.append(found)
    return runs


@pytest.mark.filterwarnings("ignore")
def test_one_rank_captures_again_while_the_other_does_not() -> None:
    for plain, planned in on_two_ranks(lengths_apart):
        assert planned == plain


SCRIPT = """
import os, signal, sys
import torch
from torch import distributed
from tests.run.test_sharded_ranks import batch, wrapped
distributed.init_process_group("gloo")
rank, case = distributed.get_rank(), sys.argv[1]
model = wrapped(1.0 + rank if case == "budget" else 1.0)
if case == "killed":
    model(**batch(rank, 0)).loss.backward()
    if rank:
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        model.transformer.h[1].register_forward_hook(kill)
model(**batch(rank, 1)).loss.backward()
"""


@pytest.mark.parametrize(
    ("case", "named"), [("budget", "the budget is 1 GB on rank 0, 2 GB on rank 1"), ("killed", "")]
)
def test_no_process_waits_for_one_that_is_gone(tmp_path: Path, case: str, named: str) -> None:
    """Under torchrun, with nothing caught: by another budget, and by a rank that is killed inside its forward."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    with socket_free_launch(script, case, environment) as launched:
        text = launched.communicate(timeout=300)[0]  # one that waits does so for half an hour
    assert launched.returncode
    assert text.count(named) >= 2


def socket_free_launch(script: Path, case: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, str(script), case], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    )
