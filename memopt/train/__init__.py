"""The training step: microbatches, loss scaling, clipping, optimisers and schedulers, in the right order."""

from memopt.train.step_result import StepResult
from memopt.train.train_step import TrainStep

__all__ = ["StepResult", "TrainStep"]
