"""A callback for the Trainer of Lightning. Tested with Lightning 2.6."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from typing_extensions import Unpack

from memopt.integrations.budgeted import Budgeted
from memopt.planning.options import DEFAULTS, StepOptions, takes_options


class MemoptCallback(Callback):
    """`Trainer(callbacks=[MemoptCallback(12)])` trains within 12 GB of 1024³ bytes.

    Options are those of `memopt.optimize` but for two defaults: dtypes are left to the Trainer's `precision`, and the
    optimizer is the LightningModule's. The figures of each plan that a step runs by go to the Trainer's loggers, as
    `memopt_budget_gb`, `memopt_peak_gb` and `memopt_added_time`. Validation, test and prediction run the plain model,
    and the model is the plain one again after the training.

    Args:
        net: the attribute of the LightningModule ("generator", "model.body") whose calls in `training_step` are to be
            planned. None: the child module that holds all trained parameters, or else the LightningModule itself,
            where `training_step` calls `self(…)`.
    """

    @takes_options(StepOptions, DEFAULTS)
    def __init__(self, budget_gb: float, *, net: str | None = None, **options: Unpack[StepOptions]) -> None:
        self._budgeted = Budgeted(budget_gb, **options)
        self._net = net

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Optimise the net. Raises `ValueError` for a name that is no submodule, and for none or several optimizers,
        unless the option `optimizer` was given."""
        net = net_of(pl_module) if self._net is None else _named(pl_module, self._net)
        self._budgeted.begin(net, self._budgeted.optimizer_among(trainer.optimizers))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the figures of the plan by which this step ran, if it is not the plan of the step before."""
        news = self._budgeted.news()
        if news is not None:
            for logger in trainer.loggers:
                logger.log_metrics(dict(news), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove memopt from the net, which is the plain model again."""
        self._budgeted.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove memopt from the net, which is the plain model again, where training ends with an error."""
        self._budgeted.end()


def net_of(module: nn.Module) -> nn.Module:
    """The child module that can be called and holds all trained parameters, of which there are any; else `module`."""
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for child in module.children():
        has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if trained and trained <= {id(parameter) for parameter in child.parameters()} and has_forward:
            return child
    return module


def _named(module: nn.Module, name: str) -> nn.Module:
    """The submodule of that name. Raises `ValueError` where there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        children = ", ".join(repr(name) for name, _ in module.named_children())
        raise ValueError(f"{type(module).__name__} has no submodule {name!r}; its submodules are {children}") from None
