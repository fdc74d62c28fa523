"""A callback for the Trainer of transformers, and for those of TRL that derive from it. Tested with transformers 5.23,
TRL 1.16 and PEFT 0.21."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import Unpack

from memopt.integrations.budgeted import Budgeted
from memopt.planning.options import DEFAULTS, StepOptions, takes_options

_log = logging.getLogger("memopt")


class MemoptCallback(TrainerCallback):
    """`Trainer(…, callbacks=[MemoptCallback(12)])` trains within 12 GB of 1024³ bytes.

    Options are those of `memopt.optimize` but for two defaults: dtypes are left to the Trainer's `bf16` and `fp16`, and
    the optimizer is the Trainer's. The figures of each plan that a step runs by go to the Trainer's log history, as
    `memopt_budget_gb`, `memopt_peak_gb` and `memopt_added_time`. Evaluation, prediction and generation run the plain
    model, and the model is the plain one again after the training.

    The setting `gradient_checkpointing` is switched off for the training, since a plan chooses what is recomputed. With
    `torch_compile`, only calls that do not train are compiled.

    The Trainer calls no callback when training ends with an error: call `end()` then to get the plain model back.
    Another training with the same callback calls it when it begins."""

    @takes_options(StepOptions, DEFAULTS)
    def __init__(self, budget_gb: float, **options: Unpack[StepOptions]) -> None:
        self._budgeted = Budgeted(budget_gb, **options)
        self._checkpointed: list[nn.Module] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Optimise the model, and switch its gradient checkpointing off. Raises `ValueError` for a Trainer with
        DeepSpeed, or with several GPUs in one process."""
        model: nn.Module = parts["model"]
        _check(args)
        self.end()
        self._checkpointed = _without_checkpoints(model)
        if self._checkpointed:
            _log.info("gradient_checkpointing is off while memopt's plans choose what is recomputed")
        if args.torch_compile:
            _log.info("torch_compile compiles only calls that do not train; training runs by memopt's plans")
        # The trainers of TRL compute the loss from log-probabilities that the model returns beside a loss.
        of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in type(args).__mro__)
        defaults = {"outputs": "all"} if of_trl else {}
        self._budgeted.begin(model, self._budgeted.optimizer_among([parts["optimizer"]]), **defaults)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Add the figures of the plan by which this step ran to the Trainer's log, if it is a new one."""
        news = self._budgeted.news()
        if news is not None and state.is_world_process_zero:
            state.log_history.append({**news, "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Remove memopt from the model, and restore the setting of gradient checkpointing."""
        self.end()

    def end(self) -> None:
        """Remove memopt from the model, and restore the setting of gradient checkpointing; once."""
        self._budgeted.end()
        for module in self._checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        self._checkpointed = []


def _check(args: TrainingArguments) -> None:
    """Raise `ValueError` for DeepSpeed and for several GPUs in one process, with which a step cannot be planned."""
    if args.deepspeed:
        raise ValueError("memopt plans no step under DeepSpeed, which holds the parameters itself; leave deepspeed out")
    if args.n_gpu > 1:
        raise ValueError(
            f"this Trainer would copy the model to {args.n_gpu} GPUs at each step (DataParallel), which memopt cannot "
            "plan; start one process for each GPU with torchrun, or make one GPU visible by CUDA_VISIBLE_DEVICES"
        )


def _without_checkpoints(model: nn.Module) -> list[nn.Module]:
    """Switch off gradient checkpointing in all modules of transformers that have it on, and return those modules."""
    found = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in found:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    return found
