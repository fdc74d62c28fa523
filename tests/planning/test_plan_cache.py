"""The second start of a job plans nothing; another job, or one with a damaged file, is planned as if nothing had been
stored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.disk_cache import opened, sealed, warn_not_kept
from memopt.planning import plan_cache
from memopt.solver import Portfolio
from tests.marks import slow

Batch = dict[str, torch.Tensor]
ROOMY, TIGHT = 0.2, 0.0036


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets that were solved for."""
    budgets: list[int] = []
    solve = Portfolio.solve

    def counted(self: Portfolio, budget_bytes: int, *args: Any, **kwargs: Any) -> Any:
        budgets.append(budget_bytes)
        return solve(self, budget_bytes, *args, **kwargs)

    monkeypatch.setattr(Portfolio, "solve", counted)
    return budgets


def make(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=64, n_layer=layers, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def batch(samples: int = 4, length: int = 64) -> Batch:
    tokens = torch.randint(0, 512, (samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def gradients(model: nn.Module, inputs: Batch) -> list[torch.Tensor]:
    model(**inputs).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def start(
    budget_gb: float = TIGHT, *, ahead: bool = False, model: nn.Module | None = None, inputs: Batch | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], memopt.Plan]:  # fmt: skip
    """A job from its start: the gradients of its first step, and its plan."""
    model, inputs = model or make(), inputs or batch()
    options = {"precision": "fp32", "allow": {"recompute"}, **options}
    memopt.optimize(model, budget_gb, **({"example_inputs": inputs} if ahead else {}), **options)
    return gradients(model, inputs), memopt.plan_of(model)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """The cache that the usual job leaves, for tests of later starts, and the gradients of its first step."""
    kept = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMOPT_CACHE_DIR", str(kept))
        found, _ = start()
    return kept / "plans", found


@pytest.fixture
def started(folder: Path, first_start: tuple[Path, list[torch.Tensor]]) -> list[torch.Tensor]:
    """The gradients of the usual job's first step, after which its plan is in the folder."""
    kept, found = first_start
    shutil.copytree(kept, folder)
    return found


@pytest.mark.parametrize("ahead", [False, slow(True)])
def test_the_second_start_solves_nothing_and_trains_as_the_first(solved: list[int], ahead: bool) -> None:
    first, plan = start(ahead=ahead)
    assert solved
    assert plan.added_time > 0
    solved.clear()
    second, again = start(ahead=ahead)
    assert not solved
    assert again == plan
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, second, gradients(make(), batch())))


def test_a_plan_made_ahead_is_that_of_the_first_step(solved: list[int]) -> None:
    model = make()
    memopt.optimize(model, TIGHT, example_inputs=batch(), precision="fp32", allow={"recompute"})
    solved.clear()
    gradients(model, batch())
    assert not solved


@pytest.mark.slow
def test_a_cached_plan_shows_its_graphs_and_answers_for_other_budgets() -> None:
    plans = []
    for _ in range(2):
        model = make()
        memopt.optimize(model, TIGHT, example_inputs=batch(), precision="fp32", allow={"recompute"})
        plans.append(memopt.plan_of(model))
    plan, cached = plans
    assert cached == plan
    assert str(cached.diff()) == str(plan.diff())
    assert cached.at(ROOMY).added_time == 0
    assert cached.smallest_bytes() == plan.smallest_bytes()


def frozen() -> nn.Module:
    model = make()
    next(model.parameters()).requires_grad_(False)
    return model


OTHERS: dict[str, Callable[[], Any]] = {
    "budget": partial(start, TIGHT * 1.1),
    "layers": lambda: start(model=make(2)),
    "batch": lambda: start(inputs=batch(3)),
    "length": lambda: start(inputs=batch(4, 48)),
    "frozen": lambda: start(model=frozen()),
    "optimizer": partial(start, optimizer="sgd"),
    "levers": partial(start, allow={"recompute", "chunked_loss"}),
    "effort": partial(start, effort="fast"),
    "outputs": partial(start, outputs="all"),
    "precision": partial(start, precision="bf16"),
}


def test_one_tensor_given_twice_is_another_job(solved: list[int]) -> None:
    inputs = batch()
    start(ahead=True, inputs=inputs)
    solved.clear()
    start(ahead=True, inputs={**inputs, "labels": inputs["labels"].clone()})
    assert solved


def test_the_usual_job_is_not_planned_again(started: list[torch.Tensor], solved: list[int]) -> None:
    start()
    assert not solved


QUICK = ("frozen",)


@pytest.mark.parametrize("what", [what if what in QUICK else slow(what) for what in OTHERS])
def test_another_job_is_planned(started: list[torch.Tensor], solved: list[int], what: str) -> None:
    OTHERS[what]()
    assert solved


@pytest.mark.slow
def test_threads_are_part_of_the_job(started: list[torch.Tensor], solved: list[int]) -> None:
    """Kernels of the CPU take a workspace per thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        start()
    finally:
        torch.set_num_threads(threads)
    assert solved


def plan_file(folder: Path) -> Path:
    (file,) = (path for path in folder.iterdir() if "plan" in path.read_text())
    return file


def reseal(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the plan in a file, and its digest with it, as nobody does by accident."""
    values = opened(json.loads(file.read_text()))
    change(values["value"])
    file.write_text(json.dumps(sealed(values)))


@pytest.mark.parametrize("text", ["", *map(slow, ("[1, 2]", '{"lever_set": 0}', '{"lever_set": 99, "plan": {}}'))])
def test_a_damaged_file_is_planned_again(
    folder: Path, started: list[torch.Tensor], text: str, solved: list[int]
) -> None:
    file = plan_file(folder)
    whole = file.read_text()
    file.write_text(text)
    second, _ = start()
    assert solved
    assert all(map(torch.equal, started, second))
    assert file.read_text() == whole


def test_a_plan_for_another_graph_is_planned_again(
    folder: Path, started: list[torch.Tensor], solved: list[int]
) -> None:
    """As after a change that the key does not cover: the compiled graphs must be the planned ones."""
    file = plan_file(folder)
    whole = file.read_text()
    reseal(file, lambda kept: kept["plan"]["regions"][0].update(fingerprint="of another"))
    second, _ = start()
    assert solved
    assert all(map(torch.equal, started, second))
    assert file.read_text() == whole


def test_nothing_is_stored_where_the_environment_disables_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    start(ahead=True)
    assert not folder.exists()


@pytest.mark.slow
def test_planning_without_training_stores_nothing(folder: Path) -> None:
    memopt.plan(make(), TIGHT, batch(), precision="fp32", allow={"recompute"})
    assert not folder.exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder would be")
    warn_not_kept.cache_clear()
    with pytest.warns(UserWarning, match="plans are not stored on disk .* set MEMOPT_CACHE_DIR") as said:
        start(ahead=True)
    assert len(said) == 1


@pytest.mark.slow
@pytest.mark.plans_always
def test_only_the_newest_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MOST", 2)
    for samples in (1, 2, 3):
        start(ROOMY, inputs=batch(samples))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
def test_another_process_finds_the_plan_of_an_earlier_one(folder: Path) -> None:
    def kept_by_a_process() -> dict[str, int]:
        job = "from tests.planning.test_plan_cache import start; start(ahead=True)"
        subprocess.run([sys.executable, "-c", job], check=True, cwd=Path(__file__).parents[2])
        return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}

    first = kept_by_a_process()
    assert first
    assert kept_by_a_process() == first
