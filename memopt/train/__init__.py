"""The training step: microbatches, loss scaling, clipping, optimizers and schedulers, in the right order."""

from memopt.train.scaling import StepResult
from memopt.train.step_state import RunState
from memopt.train.train_step import TrainStep

__all__ = ["RunState", "StepResult", "TrainStep"]
