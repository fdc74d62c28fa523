"""Loops with Accelerate, Fabric and Lightning under DDP, by the number of the rank and the part of the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.integrations.accelerate import prepare
from memopt.integrations.fabric import setup
from memopt.integrations.lightning import MemoptCallback
from tests.integrations.parts import STEPS, Part, batch, gpt2
from tests.integrations.training import EXACT, Run

from accelerate import Accelerator  # isort: skip
from lightning.fabric import Fabric  # isort: skip
from lightning.pytorch import Callback, LightningModule, Trainer  # isort: skip


def by_accelerate(rank: int, part: Part) -> Run:
    """A loop with Accelerate."""
    accelerator, model, run = Accelerator(cpu=True), gpt2(), Run()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if part.budget_gb is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare(accelerator, model, optimizer, budget_gb=part.budget_gb, **EXACT)
    if part.resumed:
        accelerator.load_state(str(part.folder))
    for number in range(part.first, STEPS):
        with part.step(number, rank, run):
            loss = model(**batch(rank, number)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        if part.saves_after(number):
            accelerator.save_state(str(part.folder))
    return part.ended(run, accelerator.unwrap_model(model))


def by_fabric(rank: int, part: Part) -> Run:
    """A loop with Fabric."""
    fabric, model, run = Fabric(accelerator="cpu", devices=2, strategy="ddp"), gpt2(), Run()
    fabric.launch()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if part.budget_gb is None:
        model, optimizer = fabric.setup(model, optimizer)
    else:
        model, optimizer = setup(fabric, model, optimizer, budget_gb=part.budget_gb, **EXACT)
    state, path = {"model": model, "optimizer": optimizer}, part.folder / "saved.ckpt"
    if part.resumed:
        fabric.load(path, state)
    for number in range(part.first, STEPS):
        with part.step(number, rank, run):
            loss = model(**batch(rank, number)).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        if part.saves_after(number):
            fabric.save(path, state)
    return part.ended(run, model.module)


class Texts(LightningModule):
    """A language model whose loss is its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.model, self.rank, self.losses = gpt2(), rank, list[float]()

    def training_step(self, _: Tensor) -> Tensor:
        """The loss of the batch of the step: Lightning begins an epoch's data again where it resumes."""
        loss: Tensor = self.model(**batch(self.rank, self.trainer.global_step)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class InParts(Callback):
    """Measures steps, saves the state, and is killed, as the part has it."""

    def __init__(self, part: Part, run: Run) -> None:
        self.part, self.ran = part, run
        self.block: Any = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Begin a step."""
        self.ran.losses = module.losses  # type: ignore[assignment]
        self.block = self.part.step(trainer.global_step, trainer.global_rank, self.ran)
        self.block.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """End a step."""
        self.block.__exit__(None, None, None)
        if self.part.saves_after(trainer.global_step - 1):
            trainer.save_checkpoint(self.part.folder / "saved.ckpt")


def by_lightning(rank: int, part: Part) -> Run:
    """Lightning's Trainer."""
    module, run = Texts(rank), Run()
    callbacks: list[Callback] = [InParts(part, run)]
    if part.budget_gb is not None:
        callbacks.insert(0, MemoptCallback(part.budget_gb, **EXACT))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=callbacks, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    numbers = torch.utils.data.DataLoader(range(STEPS), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, numbers, ckpt_path=part.folder / "saved.ckpt" if part.resumed else None, weights_only=False)
    return part.ended(run, module.model)
