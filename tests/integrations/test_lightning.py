"""Lightning's Trainer with `MemoptCallback`, and Fabric with memopt's `setup`: the same numbers within the budget."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.models.families import image_batch, vit
from memopt.api import plan_of
from memopt.run.session import session_of
from tests.elsewhere import counted
from tests.integrations.training import BUDGET_GB, EXACT, Run, assert_same, assert_within, batches, gpt2

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from memopt.integrations.fabric import setup
from memopt.integrations.lightning import MemoptCallback, net_of
from tests.marks import slow

__all__ = ["counted"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("counted")]
SAVED_AT = 3
"""The number of steps before the state is saved."""
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False
}  # fmt: skip


class Texts(LightningModule):
    """A language model whose loss is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Images(Texts):
    """A classifier whose loss is computed outside of it, from its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.criterion(self.model(batch["pixel_values"]).logits, batch["labels"])
        self.losses.append(loss.item())
        return loss


class Direct(Texts):
    """A module that calls itself: two submodules hold the parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.body, self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = cross_entropy(self(batch["pixel_values"].flatten(1)[:, :32]), batch["labels"])
        self.losses.append(loss.item())
        return loss


class Meter(Callback):
    """Measures the peak of each batch."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.block: Any = None

    def on_train_batch_start(self, *_: Any) -> None:
        self.block = self.run.measured()
        self.block.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.block.__exit__(None, None, None)


class Saver(Callback):
    """Saves the state in the middle of the epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def fit(
    kind: type[Texts],
    data: list[dict[str, Tensor]],
    budget_gb: float | None,
    *,
    callbacks: tuple[Callback, ...] = (),
    load: Path | None = None,
    **given: Any,
) -> Run:
    run = Run()
    callbacks = (Meter(run), *callbacks)
    if budget_gb is not None:
        callbacks = (MemoptCallback(budget_gb, **EXACT), *callbacks)
    torch.manual_seed(0)
    module = kind()
    trainer = Trainer(max_epochs=1, callbacks=list(callbacks), **{"enable_checkpointing": False, **QUIET, **given})
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=load, weights_only=False)
    assert session_of(net_of(module)) is None, "the model is not the plain one again"
    run.losses = module.losses
    return run.ended(module)


@pytest.mark.slow
def test_within_a_budget_and_in_the_log(tmp_path: Path) -> None:
    data = list(batches(6))
    plain = fit(Texts, data, None, accumulate_grad_batches=2)
    logger = CSVLogger(tmp_path)
    run = fit(Texts, data, BUDGET_GB, accumulate_grad_batches=2, logger=logger)
    assert_same(run, plain)
    assert_within(run, BUDGET_GB, plain)
    logger.save()
    assert "memopt_peak_gb" in (Path(logger.log_dir) / "metrics.csv").read_text()


@pytest.mark.slow
def test_resumes(tmp_path: Path) -> None:
    """As a plain run resumes: Lightning itself begins the epoch's data and random numbers again."""
    data, saved, resumed = list(batches(6)), [], []
    for budget_gb in (None, BUDGET_GB):
        path = tmp_path / str(budget_gb)
        saved.append(fit(Texts, data, budget_gb, callbacks=(Saver(path),)))
        resumed.append(fit(Texts, data, budget_gb, load=path))
    assert_same(saved[1], saved[0])
    assert_same(resumed[1], resumed[0])
    assert len(resumed[1].losses) == len(data) - SAVED_AT


@pytest.mark.slow
@pytest.mark.plans_always
@pytest.mark.parametrize("kind", [slow(Images), Direct])
def test_a_loss_outside_of_the_net(kind: type[Texts]) -> None:
    data = [image_batch("usual")] * 3
    plain = fit(kind, data, None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = fit(kind, data, 1.0)
    assert_same(run, plain)
    assert not [warning for warning in seen if "memopt" in str(warning.message)]


def test_which_net() -> None:
    assert type(net_of(Texts())).__name__ == "GPT2LMHeadModel"
    assert type(net_of(Images())).__name__ == "ViTForImageClassification"
    module = Direct()
    assert net_of(module) is module
    assert net_of(frozen := Texts().requires_grad_(False)) is frozen
    with pytest.raises(ValueError, match="no submodule 'boddy'; its submodules are 'body', 'head'"):
        MemoptCallback(1, net="boddy").on_train_start(None, module)
    with pytest.raises(TypeError, match="did you mean 'precision'"):
        MemoptCallback(1, precison="fp32")  # type: ignore[call-arg]


def train_by_fabric(budget_gb: float | None, save: Path | None = None, load: Path | None = None) -> Run:
    fabric = Fabric(accelerator="cpu", devices=1)
    model: Any = gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget_gb is None:
        model, optimizer = fabric.setup(model, optimizer)
    else:
        model, optimizer = setup(fabric, model, optimizer, budget_gb=budget_gb, **EXACT)
    torch.manual_seed(0)
    data, run = list(batches(6)), Run()
    state = {"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}
    if load is not None:
        fabric.load(load, state)
        torch.set_rng_state(state["random"])
        data = data[SAVED_AT:]
    for number, batch in enumerate(data):
        with run.measured():
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        if save is not None and number + 1 == SAVED_AT:
            fabric.save(save, {**state, "random": torch.get_rng_state()})
    if budget_gb is not None:
        assert plan_of(model.module).regions
    return run.ended(model)


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    plain, run = train_by_fabric(None), train_by_fabric(BUDGET_GB, save=tmp_path / "saved.ckpt")
    assert_same(run, plain)
    assert_within(run, BUDGET_GB, plain)
    resumed = train_by_fabric(BUDGET_GB, load=tmp_path / "saved.ckpt")
    assert_same(resumed, Run(plain.losses[SAVED_AT:], plain.weights))


def test_fabric_wants_one_optimizer() -> None:
    fabric, model = Fabric(accelerator="cpu", devices=1), gpt2()
    with pytest.raises(ValueError, match="the training has 0 optimizers"):
        setup(fabric, model, budget_gb=1)
    assert session_of(model) is None
